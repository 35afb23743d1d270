// A request for the model of echo_model.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "predictor.pb.h"

namespace tessera::test {

// A message of `samples` samples, whose scores are `first`, `first` + 1, ...
inline predictor::PredictionRequest message_of(float first, int samples) {
  predictor::PredictionRequest message;
  message.set_batch_size(samples);
  std::vector<float> dense;
  for (int row = 0; row < samples; ++row) {
    dense.insert(dense.end(), {first + static_cast<float>(row), 0});
  }
  const auto packed = [](const auto& numbers) {
    return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * 4);
  };
  message.mutable_float_features()->set_num_features(2);
  message.mutable_float_features()->set_values(packed(dense));
  const std::vector<std::int32_t> ones(static_cast<std::size_t>(3 * samples), 1);
  message.mutable_id_list_features()->set_num_features(3);
  message.mutable_id_list_features()->set_lengths(packed(ones));
  message.mutable_id_list_features()->set_values(packed(ones));
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(samples), 0);
  message.mutable_id_score_list_features()->set_num_features(1);
  message.mutable_id_score_list_features()->set_lengths(packed(zeros));
  return message;
}

}  // namespace tessera::test
