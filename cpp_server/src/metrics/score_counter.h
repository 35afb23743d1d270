// How the scores of a model are spread, by output. Outputs with several numbers a sample, such as
// vectors, are not counted. The buckets are the same for every model and in both servers, so that
// models and versions can be compared and added.
//
// Contract: count may be called from any thread and does not block; rows and their numbers may be
// read at any time.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "metrics/histogram.h"
#include "model/runner.h"
#include "package/schema.h"

namespace tessera {

// Upper bounds: narrow where probabilities of rare events lie, narrower again towards 1, and wide
// above 1 for ratings and amounts. None is below 0, as OpenMetrics forbids such a histogram a sum.
inline constexpr std::array<double, 29> kScoreBuckets = {
    0,  .001, .002, .005, .01, .02, .05, .1, .15, .2, .25, .3, .4,  .5,  .6,
    .7, .8,   .9,   .95,  .98, .99, 1,   2,  3,   4,  5,   10, 100, 1000};

class ScoreCounter {
 public:
  struct Output {
    Output(std::string its_name, std::size_t its_place)
        : name(std::move(its_name)), place(its_place) {}

    const std::string name;
    const std::size_t place;  // among the schema's outputs
    Histogram scores{kScoreBuckets};
    std::atomic<std::uint64_t> not_finite = 0;  // NaN or infinite; `scores` does not have them
  };

  explicit ScoreCounter(const std::vector<OutputSpec>& outputs);

  // Counts the scores of a pass, of which each output has at least `samples`. A pass costs as many
  // atomic additions as there are buckets that it has met.
  void count(const Scores& scores, std::int64_t samples);

  const std::deque<Output>& outputs() const { return outputs_; }

 private:
  std::deque<Output> outputs_;
};

}  // namespace tessera
