// Latencies with a bounded relative error in bounded memory, whatever their range: within each
// power of two, 128 equal buckets (the layout of HdrHistogram), so that a quantile is at most
// 1/128 above the true value.
//
// Contract: not thread-safe; one per thread, merged at the end.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace tessera {

class LatencyHistogram {
 public:
  void record(std::int64_t nanoseconds) {
    const auto value = static_cast<std::uint64_t>(nanoseconds < 0 ? 0 : nanoseconds);
    ++counts_[index(value)];
    ++total_;
    sum_ += static_cast<double>(value);
    if (value > max_) max_ = value;
  }

  void merge(const LatencyHistogram& other) {
    for (std::size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    total_ += other.total_;
    sum_ += other.sum_;
    if (other.max_ > max_) max_ = other.max_;
  }

  std::uint64_t count() const { return total_; }
  double mean_ns() const { return total_ == 0 ? 0 : sum_ / static_cast<double>(total_); }
  std::uint64_t max_ns() const { return max_; }

  // The smallest bucket's upper bound that at least `fraction` of all latencies do not exceed;
  // 0 without any.
  std::uint64_t quantile_ns(double fraction) const {
    const double rank = fraction * static_cast<double>(total_);
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      seen += counts_[i];
      if (seen > 0 && static_cast<double>(seen) >= rank) {
        return upper_bound(i) < max_ ? upper_bound(i) : max_;
      }
    }
    return max_;
  }

 private:
  static constexpr unsigned kBits = 7;
  static constexpr std::uint64_t kPerPower = 1ULL << kBits;

  // Values below kPerPower have a bucket each; above, the leading kBits + 1 bits choose it.
  static std::size_t index(std::uint64_t value) {
    if (value < kPerPower) return value;
    const unsigned shift = static_cast<unsigned>(std::bit_width(value)) - 1 - kBits;
    return (shift + 1) * kPerPower + ((value >> shift) - kPerPower);
  }

  static std::uint64_t upper_bound(std::size_t i) {
    if (i < kPerPower) return i;
    const std::size_t shift = i / kPerPower - 1;
    return ((kPerPower + i % kPerPower + 1) << shift) - 1;
  }

  std::array<std::uint64_t, (64 - kBits + 1) * kPerPower> counts_{};
  std::uint64_t total_ = 0;
  double sum_ = 0;
  std::uint64_t max_ = 0;
};

}  // namespace tessera
