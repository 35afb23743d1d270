#include "metrics/feature_counter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "request/decoder.h"
#include "support.h"

namespace tessera {
namespace {

using namespace test;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::uint64_t mixed(std::uint64_t bits) {
  bits = (bits ^ (bits >> 33)) * 0xff51afd7ed558ccdULL;
  bits = (bits ^ (bits >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return bits ^ (bits >> 33);
}

// Buffers of these vocabularies, as the packager writes them.
struct Written {
  explicit Written(const std::vector<std::vector<std::int64_t>>& vocabularies) {
    std::vector<std::pair<std::int64_t, std::int64_t>> found;
    for (const auto& ids : vocabularies) {
      seeds.push_back(static_cast<std::int64_t>(mixed(seeds.size() + 1)));
      sizes.push_back(static_cast<std::int64_t>(ids.size()));
      for (const std::int64_t id : ids) {
        const auto bits = static_cast<std::uint64_t>(id ^ seeds.back());
        found.emplace_back(static_cast<std::int64_t>(mixed(bits)),
                           static_cast<std::int64_t>(found.size()));
      }
    }
    std::sort(found.begin(), found.end());
    for (const auto& [key, place] : found) {
      keys.push_back(key);
      places.push_back(place);
    }
  }

  VocabularyBuffers buffers() const { return {keys, places, seeds, nullptr}; }

  std::vector<std::int64_t> keys, places, seeds, sizes;
};

TEST(Vocabularies, HoldTheirOwnIdsAndNoOthers) {
  Random random(7);
  std::uniform_int_distribution<std::int64_t> any(std::numeric_limits<std::int64_t>::min());
  for (const std::size_t count : {0U, 1U, 2U, 3U, 64U, 1000U}) {
    std::vector<std::int64_t> large(count);
    for (std::int64_t& id : large) id = any(random);
    const Written written({{5, -5}, large, {5, 7}});
    const Vocabularies vocabularies(written.buffers(), written.sizes);
    for (const std::int64_t id : large) {
      EXPECT_TRUE(vocabularies.holds(1, id));
      EXPECT_FALSE(vocabularies.holds(0, id));
      EXPECT_FALSE(vocabularies.holds(3, id));  // there is none of that number
    }
    EXPECT_TRUE(vocabularies.holds(0, -5));
    EXPECT_FALSE(vocabularies.holds(2, -5));
    EXPECT_TRUE(vocabularies.holds(2, 5));
    for (int i = 0; i < 1000; ++i) EXPECT_FALSE(vocabularies.holds(1, any(random)));
  }
}

TEST(Vocabularies, WithoutKeysHoldNothing) { EXPECT_FALSE(Vocabularies({}, {}).holds(0, 1)); }

std::map<std::string, std::uint64_t> by_name(const std::vector<FeatureCounter::Row>& rows) {
  std::map<std::string, std::uint64_t> found;
  for (const auto& [feature, count] : rows) found[feature] = count;
  return found;
}

TEST(FeatureCounter, CountsAsASlowLookDoes) {
  InputSchema made = schema();
  made.dense_ranges = {{-0.5F, 0.25F}, {std::nullopt, std::nullopt}};
  const Written written({{1, 2, 3, 500'000}, {7}});
  made.features[1].vocabulary = 0;  // item
  made.features[1].rows = 5;
  made.features[2].vocabulary = 1;  // score, which has weights
  made.features[2].rows = 2;
  FeatureCounter counter(made, written.buffers());
  const RequestDecoder decoder(made, {});
  std::map<std::string, std::uint64_t> outside = {
      {"age", 0}, {"price", 0}, {"item", 0}, {"score", 0}};
  std::map<std::string, std::uint64_t> missing = {{"age", 0}, {"price", 0}};
  Random random(3);
  for (const std::int32_t samples : {1, 7, 40}) {
    RequestData data = random_request(random, samples, 3);
    for (std::size_t i = 0; i < data.dense.size(); i += 5) data.dense[i] = kNaN;
    for (std::size_t i = 0; i < data.values.size(); i += 2) data.values[i] = 2;
    for (std::size_t i = 0; i < data.narrow.size(); i += 2) data.narrow[i] = 2;
    DecodedRequest request;
    ASSERT_TRUE(decoder.decode(data.view(), request).ok());
    counter.count(request);
    for (std::size_t i = 0; i < data.dense.size(); ++i) {
      const bool age = i % 2 == 0;
      const float value = data.dense[i];
      missing[age ? "age" : "price"] += std::isnan(value) ? 1 : 0;
      if (age) outside["age"] += value < -0.5F || value > 0.25F ? 1 : 0;
      if (!age) outside["price"] += std::isnan(value) ? 0 : 1;
    }
    const auto B = static_cast<std::size_t>(samples);
    const auto begin = data.lengths.begin();
    const auto first =
        static_cast<std::size_t>(std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(B), 0));
    const auto behind = static_cast<std::size_t>(
        std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(2 * B), 0));
    const std::set<std::int64_t> known = {1, 2, 3, 500'000};
    for (std::size_t i = first; i < behind; ++i) {
      const std::int64_t id = data.narrow.empty() ? data.values[i] : data.narrow[i];
      outside["item"] += known.contains(id) ? 0 : 1;
    }
    for (const std::int64_t id : data.scored_values) outside["score"] += id == 7 ? 0 : 1;
  }
  EXPECT_EQ(by_name(counter.outside()), outside);
  EXPECT_EQ(by_name(counter.missing()), missing);
  EXPECT_GT(outside["item"], 0U);
}

TEST(FeatureCounter, CountsNothingThatThePackageDoesNotSay) {
  FeatureCounter counter(schema(), {});
  EXPECT_TRUE(counter.outside().empty());
  EXPECT_TRUE(counter.missing().empty());
}

}  // namespace
}  // namespace tessera
