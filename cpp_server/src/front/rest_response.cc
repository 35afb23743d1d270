#include "front/rest_response.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "common/text.h"
#include "inference.pb.h"

namespace tessera {
namespace {

std::string quoted(const std::string& words) {
  using Json = nlohmann::json;
  return Json(words).dump(-1, ' ', false, Json::error_handler_t::replace);
}

void add_number(double number, std::string& out) {
  if (!std::isfinite(number)) {
    out += "null";
    return;
  }
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  const std::string_view written(digits.data(), static_cast<std::size_t>(end - digits.data()));
  out += written;
  // A whole number without a point is another number to some readers: -0 has no sign there.
  if (written.find_first_not_of("-0123456789") == written.npos) out += ".0";
}

// The float32 numbers in `raw`, as a list.
void add_numbers(const std::string& raw, std::string& out) {
  out += '[';
  for (std::size_t at = 0; at + sizeof(float) <= raw.size(); at += sizeof(float)) {
    float score = 0;
    std::memcpy(&score, raw.data() + at, sizeof(float));
    if (at > 0) out += ',';
    add_number(double{score}, out);
  }
  out += ']';
}

}  // namespace

HttpAnswer rest_answer(std::string_view message, const RestEncodings& encodings) {
  inference::ModelInferResponse response;
  response.ParseFromArray(message.data(), static_cast<int>(message.size()));
  std::string json = "{\"model_name\":" + quoted(response.model_name()) +
                     ",\"model_version\":" + quoted(response.model_version());
  if (!response.id().empty()) json += ",\"id\":" + quoted(response.id());
  if (!response.parameters().empty()) {
    json += ",\"parameters\":{";
    for (const auto& [key, value] : response.parameters()) {
      if (json.back() != '{') json += ',';
      json += quoted(key) + ':' + text(value.int64_param());
    }
    json += '}';
  }
  json += ",\"outputs\":[";
  std::string binary;
  bool any_binary = false;
  for (int at = 0; at < response.outputs_size(); ++at) {
    const auto& output = response.outputs(at);
    const std::string& raw = response.raw_output_contents(at);
    if (at > 0) json += ',';
    json += "{\"name\":" + quoted(output.name()) + ",\"datatype\":" + quoted(output.datatype()) +
            ",\"shape\":[";
    for (int i = 0; i < output.shape_size(); ++i) json += text(i > 0 ? "," : "", output.shape(i));
    json += ']';
    if (encodings.placed.contains(output.name())) {
      json += '}';
    } else if (encodings.binary(output.name())) {
      json += text(",\"parameters\":{\"binary_data_size\":", raw.size(), "}}");
      binary += raw;
      any_binary = true;
    } else {
      json += ",\"data\":";
      add_numbers(raw, json);
      json += '}';
    }
  }
  json += "]}";
  HttpAnswer answer{.content_type = "application/json"};
  if (any_binary) {
    answer.content_type = "application/octet-stream";
    answer.json_bytes = json.size();
  }
  answer.body = std::move(json) + binary;
  return answer;
}

}  // namespace tessera
