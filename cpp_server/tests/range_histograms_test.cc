#include "metrics/range_histograms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "support.h"

namespace tessera {
namespace {

using namespace test;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();

using Range = DenseRange;

InputSchema with_ranges(const std::vector<Range>& ranges) {
  InputSchema made;
  for (const Range& range : ranges) {
    made.dense_features.push_back("f" + std::to_string(made.dense_features.size()));
    made.dense_ranges.push_back(range);
  }
  return made;
}

// A request of these values [B, F]; it borrows them.
DecodedRequest request_of(const std::vector<float>& dense, std::size_t features) {
  DecodedRequest request;
  request.samples = static_cast<std::int32_t>(dense.size() / features);
  request.dense = bytes_of(dense);
  return request;
}

void count(RangeHistograms& histograms, const std::vector<float>& dense, std::size_t features) {
  const DecodedRequest request = request_of(dense, features);
  histograms.count([&](const auto& look) { look(request); });
}

// One value after the other, by the bounds as values.
std::vector<std::uint64_t> slowly(const std::vector<float>& values, float least, float most) {
  std::vector<std::uint64_t> counts(kRangeBuckets.size() + 1);
  for (const float value : values) {
    if (std::isnan(value)) continue;
    std::size_t bucket = 0;
    while (bucket < kRangeBuckets.size()) {
      const double bound = least + kRangeBuckets[bucket] * (static_cast<double>(most) - least);
      if (value <= static_cast<float>(bound)) break;
      ++bucket;
    }
    ++counts[bucket];
  }
  return counts;
}

TEST(RangeHistograms, CountsAsASlowLookDoes) {
  constexpr std::size_t kFeatures = 21;  // more than are looked at together
  Random random(5);
  std::normal_distribution<float> normal(0, 1);
  std::vector<Range> ranges;
  for (std::size_t f = 0; f < kFeatures; ++f) {
    const float least = normal(random);
    ranges.push_back({least, least + std::abs(normal(random)) + .1F});
  }
  RangeHistograms histograms(with_ranges(ranges));
  ASSERT_EQ(histograms.features().size(), kFeatures);
  std::vector<std::vector<float>> values(kFeatures);
  std::vector<std::vector<float>> requests;
  for (const std::size_t samples : {1U, 3U, 50U, 200U}) {
    std::vector<float> dense;
    for (std::size_t i = 0; i < samples * kFeatures; ++i) {
      const std::size_t f = i % kFeatures;
      const float value = i % 11 == 0 ? kNaN : i % 13 == 0 ? *ranges[f].most : normal(random);
      dense.push_back(value);
      values[f].push_back(value);
    }
    requests.push_back(dense);
  }
  count(histograms, requests[0], kFeatures);
  histograms.count([&](const auto& look) {  // several requests in one batch
    for (std::size_t i = 1; i < requests.size(); ++i) look(request_of(requests[i], kFeatures));
  });
  for (std::size_t f = 0; f < kFeatures; ++f) {
    const RangeHistograms::Feature& feature = histograms.features()[f];
    const float least = *ranges[f].least;
    const float most = *ranges[f].most;
    EXPECT_EQ(feature.name, "f" + std::to_string(f));
    EXPECT_EQ(feature.positions.counts(), slowly(values[f], least, most));
    double sum = 0;
    for (const float value : values[f]) {
      const double position =
          (value - static_cast<double>(least)) / (most - static_cast<double>(least));
      if (!std::isnan(value)) sum += std::clamp(position, 0.0, 1.0);
    }
    EXPECT_NEAR(feature.positions.sum(), sum, 1e-6 * sum);
  }
}

TEST(RangeHistograms, TakesEveryRangeAndValue) {
  // All floats, one value alone, none at all.
  RangeHistograms histograms(
      with_ranges({{-kMost, kMost}, {2.F, 2.F}, {std::nullopt, std::nullopt}}));
  ASSERT_EQ(histograms.features().size(), 2U);
  const std::vector<float> values = {-kMost, 0, kMost, kInf, -kInf, kNaN, 2, 3, 1};
  std::vector<float> dense;
  for (const float value : values) dense.insert(dense.end(), {value, value, value});
  count(histograms, dense, 3);
  const auto& whole = histograms.features()[0].positions;
  EXPECT_EQ(whole.counts(), slowly(values, -kMost, kMost));
  EXPECT_EQ(whole.counts().front(), 2U);  // the least and what is below it
  EXPECT_EQ(whole.counts().back(), 1U);
  EXPECT_TRUE(std::isfinite(whole.sum()));
  const auto& one = histograms.features()[1].positions;
  EXPECT_EQ(one.counts(), slowly(values, 2, 2));
  EXPECT_EQ(one.counts().back(), 3U);
  EXPECT_EQ(one.sum(), 0);
}

TEST(RangeHistograms, KnowsNothingThatThePackageDoesNotSay) {
  RangeHistograms histograms(schema());
  EXPECT_TRUE(histograms.features().empty());
  count(histograms, {1, 2}, 2);
}

TEST(RangeHistograms, ManyThreadsLoseNothing) {
  RangeHistograms histograms(with_ranges({{0.F, 1.F}}));
  const std::vector<float> dense = {.05F, .5F, kNaN};
  std::vector<std::jthread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int pass = 0; pass < 1000; ++pass) count(histograms, dense, 1);
    });
  }
  threads.clear();
  std::vector<float> all(4000, .05F);
  all.resize(8000, .5F);
  EXPECT_EQ(histograms.features()[0].positions.counts(), slowly(all, 0, 1));
}

}  // namespace
}  // namespace tessera
