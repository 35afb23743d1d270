// ModelInferRequests for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "inference.pb.h"
#include "support.h"

namespace tessera::test {

template <typename T>
std::string packed(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

// What a tensor's contents are, raw and typed.
struct Filler {
  inference::ModelInferRequest& request;
  bool typed;

  auto& add(const char* name, const char* datatype, std::vector<std::int64_t> shape) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype(datatype);
    for (const std::int64_t size : shape) input.add_shape(size);
    return *input.mutable_contents();
  }
  template <typename T, typename Add>
  void fill(inference::InferTensorContents& contents, const std::vector<T>& numbers, Add add_one) {
    if (!typed) {
      request.add_raw_input_contents(packed(numbers));
      return;
    }
    for (const T number : numbers) (contents.*add_one)(number);
  }
};

inline inference::ModelInferRequest request_of(const RequestData& data, bool typed) {
  inference::ModelInferRequest request;
  using Contents = inference::InferTensorContents;
  Filler filler{request, typed};
  const auto size = [](const auto& numbers) { return static_cast<std::int64_t>(numbers.size()); };
  filler.fill(filler.add("float_features", "FP32", {data.samples, 2}), data.dense,
              &Contents::add_fp32_contents);
  filler.fill(filler.add("id_list_features_lengths", "INT32", {size(data.lengths)}), data.lengths,
              &Contents::add_int_contents);
  if (data.narrow.empty()) {
    filler.fill(filler.add("id_list_features_values", "INT64", {size(data.values)}), data.values,
                &Contents::add_int64_contents);
  } else {
    filler.fill(filler.add("id_list_features_values", "INT32", {size(data.narrow)}), data.narrow,
                &Contents::add_int_contents);
  }
  filler.fill(filler.add("id_score_list_features_lengths", "INT32", {size(data.scored_lengths)}),
              data.scored_lengths, &Contents::add_int_contents);
  filler.fill(filler.add("id_score_list_features_values", "INT64", {size(data.scored_values)}),
              data.scored_values, &Contents::add_int64_contents);
  filler.fill(filler.add("id_score_list_features_weights", "FP32", {size(data.weights)}),
              data.weights, &Contents::add_fp32_contents);
  return request;
}

// Moves the inputs' contents, but those of the input `keep`, out of the message, into what is to be
// the content of a region named "region", one behind the other.
inline std::string place(inference::ModelInferRequest& request, int keep = -1) {
  std::string content;
  inference::ModelInferRequest placed = request;
  placed.clear_raw_input_contents();
  for (int i = 0; i < request.inputs_size(); ++i) {
    if (i == keep) {
      placed.add_raw_input_contents(request.raw_input_contents(i));
      continue;
    }
    auto& parameters = *placed.mutable_inputs(i)->mutable_parameters();
    const std::string& raw = request.raw_input_contents(i);
    parameters["shared_memory_region"].set_string_param("region");
    parameters["shared_memory_offset"].set_int64_param(static_cast<std::int64_t>(content.size()));
    parameters["shared_memory_byte_size"].set_uint64_param(raw.size());
    content += raw;
  }
  request = placed;
  return content;
}

}  // namespace tessera::test
