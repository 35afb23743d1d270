#include "metrics/score_counter.h"

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

// Outputs of a pass, by their place in the schema.
class GivenScores final : public Scores {
 public:
  explicit GivenScores(std::vector<std::vector<float>> outputs) : outputs_(std::move(outputs)) {}
  std::span<const float> output(std::size_t index) const override { return outputs_[index]; }

 private:
  std::vector<std::vector<float>> outputs_;
};

const std::vector<OutputSpec> kOutputs = {{"clicked", 1}, {"vector", 3}, {"rating", 1}};
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<std::uint64_t> slowly(const std::vector<float>& scores) {
  std::vector<std::uint64_t> counts(kScoreBuckets.size() + 1);
  for (const float score : scores) {
    std::size_t bucket = 0;
    while (bucket < kScoreBuckets.size() && !(score <= kScoreBuckets[bucket])) ++bucket;
    ++counts[bucket];
  }
  return counts;
}

TEST(ScoreCounter, HasOutputsOfOneNumberInTheirOrder) {
  const ScoreCounter counter(kOutputs);
  ASSERT_EQ(counter.outputs().size(), 2U);
  EXPECT_EQ(counter.outputs()[0].name, "clicked");
  EXPECT_EQ(counter.outputs()[1].name, "rating");
  EXPECT_TRUE(std::is_sorted(kScoreBuckets.begin(), kScoreBuckets.end()));
}

TEST(ScoreCounter, CountsAsASlowLookDoes) {
  Random random(11);
  std::uniform_real_distribution<float> probability(0, 1);
  std::normal_distribution<float> rating(3, 100);
  ScoreCounter counter(kOutputs);
  std::vector<float> clicked;
  std::vector<float> ratings;
  for (const std::int64_t samples : {1, 2, 7, 64, 1000}) {
    std::vector<float> own;
    std::vector<float> others;
    for (std::int64_t i = 0; i < samples; ++i) {
      own.push_back(i % 5 == 0 ? static_cast<float>(kScoreBuckets[random() % kScoreBuckets.size()])
                               : probability(random));
      others.push_back(rating(random));
    }
    clicked.insert(clicked.end(), own.begin(), own.end());
    ratings.insert(ratings.end(), others.begin(), others.end());
    own.push_back(.5F);  // rows of padding behind the samples
    others.push_back(std::nanf(""));
    counter.count(GivenScores({own, std::vector<float>(3 * own.size(), .5F), others}), samples);
  }
  const auto& outputs = counter.outputs();
  EXPECT_EQ(outputs[0].scores.counts(), slowly(clicked));
  EXPECT_EQ(outputs[1].scores.counts(), slowly(ratings));
  double sum = 0;
  for (const float score : clicked) sum += score;
  EXPECT_NEAR(outputs[0].scores.sum(), sum, 1e-9 * sum);
  EXPECT_EQ(outputs[0].not_finite, 0U);
  EXPECT_EQ(outputs[1].not_finite, 0U);
}

TEST(ScoreCounter, CountsWhatIsNotFiniteByItself) {
  ScoreCounter counter(kOutputs);
  counter.count(GivenScores({{std::nanf(""), .25F, kInf, -kInf},
                             std::vector<float>(12, 0),
                             {1, 2, 3, std::numeric_limits<float>::max()}}),
                4);
  const auto& outputs = counter.outputs();
  EXPECT_EQ(outputs[0].not_finite, 3U);
  EXPECT_EQ(outputs[0].scores.counts(), slowly({.25F}));
  EXPECT_EQ(outputs[0].scores.sum(), .25);
  EXPECT_EQ(outputs[1].not_finite, 0U);
  EXPECT_EQ(outputs[1].scores.counts().back(), 1U);
}

TEST(ScoreCounter, ManyThreadsLoseNothing) {
  ScoreCounter counter({{"clicked", 1}});
  const GivenScores scores({{.05F, .5F, .5F}});
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int pass = 0; pass < 1000; ++pass) counter.count(scores, 3);
    });
  }
  threads.clear();
  std::vector<float> all(4000, .05F);
  all.resize(12000, .5F);
  EXPECT_EQ(counter.outputs()[0].scores.counts(), slowly(all));
}

}  // namespace
}  // namespace tessera
