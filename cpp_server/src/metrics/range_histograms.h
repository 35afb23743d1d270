// Where the dense values of a model's requests lie in the range of what the training rows held: 0
// is the least value that a training row had, 1 the largest. A feature that moves within its range,
// as when its unit changes from euros to thousands of them, is seen here and nowhere else. The
// buckets are the same for every feature and in both servers, so that features, models and versions
// can be compared.
//
// Contract: count may be called from any thread and does not block; features and their numbers may
// be read at any time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "metrics/histogram.h"
#include "package/schema.h"
#include "request/decoded_request.h"

namespace tessera {

// Upper bounds: counts and amounts, whose largest value is far above all others, lie near 0. What
// is at or below the least is in the first bucket, what is above the largest behind the last bound.
inline constexpr std::array<double, 10> kRangeBuckets = {0,   .0001, .001, .01, .1,
                                                         .25, .5,    .75,  .9,  1};

class RangeHistograms {
 public:
  // A dense feature of which a training row had a value.
  struct Feature {
    Feature(std::string its_name, std::size_t its_place, float least, float most);

    const std::string name;
    const std::size_t place;                        // among the schema's dense features
    std::array<float, kRangeBuckets.size()> upper;  // the buckets' bounds as values
    double least;
    double scale;                        // 1 / (most - least); 0 where they are the same
    Histogram positions{kRangeBuckets};  // its sum is of positions bounded to [0, 1]
  };

  explicit RangeHistograms(const InputSchema& schema);

  // Counts the requests that `each` calls its argument with, which have been checked and make one
  // batch. Values that are missing are not counted. A batch costs as many atomic additions as there
  // are buckets that it has met.
  template <typename Each>
  void count(const Each& each) {
    for (std::size_t first = 0; first < features_.size(); first += kBlock) {
      Block block{.first = first, .features = std::min(kBlock, features_.size() - first)};
      each([&](const DecodedRequest& request) { look(request, block); });
      add(block);
    }
  }

  const std::deque<Feature>& features() const { return features_; }

 private:
  static constexpr std::size_t kBlock = 16;  // features whose counts stay on the stack

  using Above = std::array<std::uint32_t, kRangeBuckets.size()>;  // values above each bound

  struct Block {
    std::size_t first;
    std::size_t features;
    std::array<std::uint64_t, kBlock> present{};
    std::array<Above, kBlock> above{};
    std::array<double, kBlock> sum{};
  };

  void look(const DecodedRequest& request, Block& block) const;
  void add(const Block& block);

  std::size_t dense_features_;
  std::deque<Feature> features_;
};

}  // namespace tessera
