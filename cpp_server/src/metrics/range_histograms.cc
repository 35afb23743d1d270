#include "metrics/range_histograms.h"

#include <cmath>
#include <utility>

#include "request/packed.h"

namespace tessera {

RangeHistograms::Feature::Feature(std::string its_name, std::size_t its_place, float its_least,
                                  float most)
    : name(std::move(its_name)), place(its_place), upper(), least(its_least) {
  const double width = static_cast<double>(most) - least;
  scale = width > 0 ? 1 / width : 0;
  for (std::size_t k = 0; k < upper.size(); ++k) {
    upper[k] = static_cast<float>(least + kRangeBuckets[k] * width);
  }
  upper.back() = most;  // whatever the sum was rounded to
}

RangeHistograms::RangeHistograms(const InputSchema& schema)
    : dense_features_(schema.dense_features.size()) {
  for (std::size_t f = 0; f < schema.dense_ranges.size(); ++f) {
    const auto& [least, most] = schema.dense_ranges[f];
    if (!least.has_value() || !most.has_value()) continue;  // no training row had a value
    features_.emplace_back(schema.dense_features[f], f, *least, *most);
  }
}

void RangeHistograms::look(const DecodedRequest& request, Block& block) const {
  const auto B = static_cast<std::size_t>(request.samples);
  for (std::size_t i = 0; i < block.features; ++i) {
    const Feature& feature = features_[block.first + i];
    Above& above = block.above[i];
    for (std::size_t b = 0; b < B; ++b) {
      const float value = load<float>(request.dense.data(), b * dense_features_ + feature.place);
      // Comparisons with NaN are false, so that a missing value is above nothing.
      block.present[i] += std::isnan(value) ? 0 : 1;
      for (std::size_t k = 0; k < kRangeBuckets.size(); ++k) {
        above[k] += value > feature.upper[k] ? 1 : 0;
      }
      const double position = (value - feature.least) * feature.scale;
      block.sum[i] += position > 0 ? std::min(position, 1.0) : 0.0;
    }
  }
}

void RangeHistograms::add(const Block& block) {
  for (std::size_t i = 0; i < block.features; ++i) {
    if (block.present[i] == 0) continue;
    std::array<std::uint64_t, kRangeBuckets.size() + 1> counts{};
    std::uint64_t left = block.present[i];
    for (std::size_t k = 0; k < kRangeBuckets.size(); ++k) {
      counts[k] = left - block.above[i][k];
      left = block.above[i][k];
    }
    counts.back() = left;
    features_[block.first + i].positions.add(counts, block.sum[i]);
  }
}

}  // namespace tessera
