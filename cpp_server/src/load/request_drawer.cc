#include "load/request_drawer.h"

#include <vector>

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

  void write(predictor::SparseFeatures& message, std::int32_t features) const {
    message.set_num_features(features);
    message.set_lengths(raw(lengths));
    message.set_values_int64(raw(values));
    message.set_weights(raw(weights));
  }
};

}  // namespace

std::int64_t RequestDrawer::draw_id(const FeatureSpec& feature) {
  // Where ids are hashed they look like those of real logs, else they are rows.
  if (feature.hashing != Hashing::kNone) return static_cast<std::int64_t>(random_());
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
  for (const FeatureSpec& feature : schema_.features) {
    const bool is_scored = feature.group == Group::kIdScoreList;
    const bool is_shared = !is_scored && shared_message.names_size() < options_.shared_features;
    GroupBytes& group = is_scored ? scored : is_shared ? shared : own;
    if (is_scored) ++scored_features;
    if (!is_scored && !is_shared) ++own_features;
    if (is_shared) shared_message.add_names(feature.name);
    for (std::int64_t row = 0; row < (is_shared ? 1 : B); ++row) {
      group.lengths.push_back(static_cast<std::int32_t>(options_.ids_per_bag));
      for (std::int64_t k = 0; k < options_.ids_per_bag; ++k) {
        group.values.push_back(draw_id(feature));
        if (is_scored) group.weights.push_back(1.0F);
      }
    }
  }
  own.write(*request.mutable_id_list_features(), own_features);
  scored.write(*request.mutable_id_score_list_features(), scored_features);
  if (options_.shared_features == 0) {
    request.clear_shared_features();
  } else {
    shared.write(*shared_message.mutable_features(), shared_message.names_size());
    shared_message.set_num_rows(1);
    shared_message.set_row_index(raw(std::vector<std::int32_t>(static_cast<std::size_t>(B), 0)));
  }
  return request.SerializeAsString();
}

}  // namespace tessera
