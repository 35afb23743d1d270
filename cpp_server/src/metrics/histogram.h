// Counts per bucket, without a lock: an observation is a bisection and two atomic additions to what
// few threads share (common/spread.h).
//
// Contract: observe may be called from any thread. A reader sees every observation that was
// finished before it began to read; one that runs meanwhile may be seen in part.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/spread.h"

namespace tessera {

// Upper bounds in seconds.
inline constexpr std::array<double, 27> kLatencyBuckets = {
    .0001, .0002, .0003, .0006, .001, .002, .003, .004, .005, .006, .008, .01, .013, .016,
    .02,   .025,  .03,   .04,   .05,  .065, .08,  .1,   .2,   .5,   1.0,  2.0, 5.0};

// 1, 2, 4, ...: `N` of them.
template <std::size_t N>
constexpr std::array<double, N> powers_of_two() {
  std::array<double, N> bounds{};
  double bound = 1;
  for (double& value : bounds) {
    value = bound;
    bound *= 2;
  }
  return bounds;
}

inline constexpr auto kRequestBuckets = powers_of_two<13>();
inline constexpr auto kSampleBuckets = powers_of_two<17>();
inline constexpr auto kIdBuckets = powers_of_two<23>();

class Histogram {
 public:
  static constexpr std::size_t kMostBounds = 30;

  // `bounds` is sorted, has at most kMostBounds and outlives the histogram.
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds) {
    assert(bounds.size() <= kMostBounds);
  }

  // Counts `value` in the first bucket whose upper bound is not below it.
  void observe(double value) {
    Buckets& mine = buckets_.mine();
    mine.counts[bucket_of(value)].fetch_add(1, std::memory_order_relaxed);
    mine.sum.fetch_add(value, std::memory_order_relaxed);
  }

  // The bucket that observe counts `value` in.
  std::size_t bucket_of(double value) const {
    const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
    return static_cast<std::size_t>(at);
  }

  // Counts many values whose sum is `sum` at once, by bucket: `counts` has one number for each.
  void add(std::span<const std::uint64_t> counts, double sum) {
    Buckets& mine = buckets_.mine();
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] != 0) mine.counts[i].fetch_add(counts[i], std::memory_order_relaxed);
    }
    mine.sum.fetch_add(sum, std::memory_order_relaxed);
  }

  std::span<const double> bounds() const { return bounds_; }

  // Per bucket, not cumulated; the last one is above every bound.
  std::vector<std::uint64_t> counts() const {
    std::vector<std::uint64_t> counts(bounds_.size() + 1);
    buckets_.each([&](const Buckets& some) {
      for (std::size_t i = 0; i < counts.size(); ++i) {
        counts[i] += some.counts[i].load(std::memory_order_relaxed);
      }
    });
    return counts;
  }

  double sum() const {
    return buckets_.sum(
        [](const Buckets& some) { return some.sum.load(std::memory_order_relaxed); });
  }

 private:
  struct alignas(64) Buckets {
    std::array<std::atomic<std::uint64_t>, kMostBounds + 1> counts{};
    std::atomic<double> sum = 0;
  };

  std::span<const double> bounds_;
  Spread<Buckets> buckets_;
};

// An estimate of the `fraction` quantile of `counts`, linear inside its bucket; NaN without
// observations, the last bound above all bounds.
double quantile(std::span<const double> bounds, std::span<const std::uint64_t> counts,
                double fraction);

}  // namespace tessera
