#include "metrics/feature_counter.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "request/checks.h"
#include "request/packed.h"

namespace tessera {
namespace {

using Counts = std::unique_ptr<std::atomic<std::uint64_t>[]>;

// How many ids each vocabulary has; its table has one row more, for all others.
std::vector<std::int64_t> sizes_of(const InputSchema& schema, std::size_t vocabularies) {
  std::vector<std::int64_t> sizes(vocabularies, 0);
  for (const FeatureSpec& feature : schema.features) {
    const auto number = static_cast<std::size_t>(feature.vocabulary.value_or(-1));
    if (number < sizes.size()) sizes[number] = feature.rows - 1;
  }
  return sizes;
}

Counts zeros(std::size_t count) {
  return std::make_unique<std::atomic<std::uint64_t>[]>(std::max<std::size_t>(count, 1));
}

void add(std::atomic<std::uint64_t>& count, std::uint64_t more) {
  if (more != 0) count.fetch_add(more, std::memory_order_relaxed);
}

std::vector<FeatureCounter::Row> rows(const std::vector<std::string>& names, const Counts& counts) {
  std::vector<FeatureCounter::Row> found;
  found.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    found.push_back({names[i], counts[i].load(std::memory_order_relaxed)});
  }
  return found;
}

}  // namespace

FeatureCounter::FeatureCounter(const InputSchema& schema, const VocabularyBuffers& buffers)
    : vocabularies_(buffers, sizes_of(schema, buffers.seeds.size())) {
  for (std::size_t f = 0; f < schema.dense_ranges.size(); ++f) {
    const DenseRange& range = schema.dense_ranges[f];
    dense_names_.push_back(schema.dense_features[f]);
    // A feature of which no training row had a value has an empty range.
    least_.push_back(range.least.value_or(std::numeric_limits<float>::infinity()));
    most_.push_back(range.most.value_or(-std::numeric_limits<float>::infinity()));
  }
  outside_names_ = dense_names_;
  for (const FeatureSpec& feature : schema.features) {
    std::vector<Feature>& group = feature.group == Group::kIdList ? plain_ : scored_;
    group.push_back(
        {.vocabulary = feature.vocabulary.value_or(-1), .count = outside_names_.size()});
    if (feature.vocabulary.has_value()) outside_names_.push_back(feature.name);
  }
  looks_at_ids_ = !buffers.keys.empty() && outside_names_.size() > dense_names_.size();
  missing_ = zeros(dense_names_.size());
  outside_ = zeros(outside_names_.size());
}

std::vector<FeatureCounter::Row> FeatureCounter::missing() const {
  return rows(dense_names_, missing_);
}

std::vector<FeatureCounter::Row> FeatureCounter::outside() const {
  return rows(outside_names_, outside_);
}

void FeatureCounter::count(const DecodedRequest& request) {
  if (!dense_names_.empty()) count_dense(request);
  if (!looks_at_ids_) return;
  count_ids(plain_, request.id_list);
  count_ids(scored_, request.id_score_list);
}

void FeatureCounter::count_dense(const DecodedRequest& request) {
  // A few features at a time, so that the counts stay in registers or on the stack.
  constexpr std::size_t kBlock = 16;
  const std::size_t F = dense_names_.size();
  const auto B = static_cast<std::size_t>(request.samples);
  for (std::size_t first = 0; first < F; first += kBlock) {
    const std::size_t features = std::min(kBlock, F - first);
    std::uint32_t missing[kBlock] = {};
    std::uint32_t outside[kBlock] = {};
    for (std::size_t b = 0; b < B; ++b) {
      for (std::size_t f = 0; f < features; ++f) {
        const float value = load<float>(request.dense.data(), b * F + first + f);
        missing[f] += std::isnan(value) ? 1 : 0;
        const unsigned below = value < least_[first + f] ? 1 : 0;
        outside[f] += below | (value > most_[first + f] ? 1U : 0U);
      }
    }
    for (std::size_t f = 0; f < features; ++f) {
      add(missing_[first + f], missing[f]);
      add(outside_[first + f], outside[f]);
    }
  }
}

void FeatureCounter::count_ids(const std::vector<Feature>& features, const JaggedView& group) {
  std::size_t first = 0;
  for (std::size_t f = 0; f < features.size(); ++f) {
    const auto ids = static_cast<std::size_t>(group.ids[f]);
    if (features[f].vocabulary >= 0) {
      const auto number = static_cast<std::size_t>(features[f].vocabulary);
      std::uint64_t outside = 0;
      for (std::size_t i = first; i < first + ids; ++i) {
        outside += vocabularies_.holds(number, id_at(group, i)) ? 0 : 1;
      }
      add(outside_[features[f].count], outside);
    }
    first += ids;
  }
}

}  // namespace tessera
