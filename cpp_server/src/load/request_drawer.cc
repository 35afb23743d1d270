#include "load/request_drawer.h"

#include <utility>
#include <vector>

#include "common/flags.h"
#include "common/text.h"
#include "predictor.pb.h"

namespace tessera {
namespace {

template <typename T>
std::string raw(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

// One group while it is filled.
struct GroupBytes {
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> values;
  std::vector<float> weights;

  void write(predictor::SparseFeatures& message, std::int32_t features, bool int32_ids) const {
    message.set_num_features(features);
    message.set_lengths(raw(lengths));
    if (int32_ids) {
      message.set_values(raw(std::vector<std::int32_t>(values.begin(), values.end())));
    } else {
      message.set_values_int64(raw(values));
    }
    message.set_weights(raw(weights));
  }
};

}  // namespace

RequestDrawer::RequestDrawer(const InputSchema& schema, DrawOptions options, std::uint64_t seed)
    : schema_(schema), options_(std::move(options)), random_(seed) {
  const std::size_t given = options_.ids_per_bag.size();
  if (given != 1 && given != schema.features.size()) {
    throw UsageError(text("--ids-per-bag has ", given,
                          " numbers; give one, or one for each of the ", schema.features.size(),
                          " features"));
  }
}

std::int64_t RequestDrawer::draw_id(const FeatureSpec& feature) {
  // Where ids are hashed they look like those of real logs, else they are rows.
  if (feature.hashing != Hashing::kNone) {
    const std::uint64_t bits = random_();
    return options_.int32_ids ? static_cast<std::int32_t>(bits) : static_cast<std::int64_t>(bits);
  }
  return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(feature.rows));
}

std::string RequestDrawer::draw() {
  const std::int64_t B = options_.samples;
  predictor::PredictionRequest request;
  request.set_batch_size(static_cast<std::int32_t>(B));
  std::normal_distribution<float> normal;
  std::vector<float> dense;
  const std::size_t dense_features = schema_.dense_features.size();
  for (std::size_t i = 0; i < dense_features * static_cast<std::size_t>(B); ++i) {
    dense.push_back(normal(random_));
  }
  request.mutable_float_features()->set_num_features(static_cast<std::int32_t>(dense_features));
  request.mutable_float_features()->set_values(raw(dense));

  GroupBytes own;
  GroupBytes shared;
  GroupBytes scored;
  std::int32_t own_features = 0;
  std::int32_t scored_features = 0;
  auto& shared_message = *request.mutable_shared_features();
  for (std::size_t f = 0; f < schema_.features.size(); ++f) {
    const FeatureSpec& feature = schema_.features[f];
    const bool is_scored = feature.group == Group::kIdScoreList;
    const bool is_shared = !is_scored && shared_message.names_size() < options_.shared_features;
    GroupBytes& group = is_scored ? scored : is_shared ? shared : own;
    if (is_scored) ++scored_features;
    if (!is_scored && !is_shared) ++own_features;
    if (is_shared) shared_message.add_names(feature.name);
    for (std::int64_t row = 0; row < (is_shared ? 1 : B); ++row) {
      group.lengths.push_back(static_cast<std::int32_t>(bag_size(f)));
      for (std::int64_t k = 0; k < bag_size(f); ++k) {
        group.values.push_back(draw_id(feature));
        if (is_scored) group.weights.push_back(1.0F);
      }
    }
  }
  own.write(*request.mutable_id_list_features(), own_features, options_.int32_ids);
  scored.write(*request.mutable_id_score_list_features(), scored_features, options_.int32_ids);
  if (options_.shared_features == 0) {
    request.clear_shared_features();
  } else {
    shared.write(*shared_message.mutable_features(), shared_message.names_size(),
                 options_.int32_ids);
    shared_message.set_num_rows(1);
    shared_message.set_row_index(raw(std::vector<std::int32_t>(static_cast<std::size_t>(B), 0)));
  }
  return request.SerializeAsString();
}

}  // namespace tessera
