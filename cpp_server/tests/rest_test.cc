// REST's encodings: bodies as ModelInferRequests, and ModelInferResponses as bodies.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/text.h"
#include "front/rest_json.h"
#include "front/rest_pages.h"
#include "front/rest_request.h"
#include "front/rest_response.h"
#include "inference.pb.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// The reason that `content` is refused for; empty: it is not.
std::string refusal_of(const std::string& content) {
  Json json;
  return read_rest_json(content, json).message;
}

TEST(RestJson, TakesWhatIsJson) {
  for (const std::string good :
       {"{}", " [1] ", "\"\\ud83d\\ude00\"", "[1e308, -0, 1E-400]", "\"[[[[[[[[[[\"",
        "[[[[[[[[1]]]]]]]]", "\"\\\"[[[[[[[[[[\\\\\"", "{\"a\":{\"a\":{}},\"b\":{\"a\":1}}"}) {
    EXPECT_EQ(refusal_of(good), "") << good;
  }
}

TEST(RestJson, RefusesWhatIsNot) {
  using namespace std::string_literals;
  for (const std::string& bad :
       {""s, "{"s, "[1,]"s, "[01]"s, "[1e309]"s, "[NaN]"s, "\xef\xbb\xbf{}"s, "{}\0"s, "{}\0{"s,
        "\"\xff\""s, "\"\\ud800\""s, "{} {}"s, "[1] // why"s, std::string(400, '9')}) {
    EXPECT_EQ(refusal_of(bad), text("the JSON (", bad.size(),
                                    " bytes) is not valid, or has a number that is larger than a "
                                    "double may be"));
  }
  EXPECT_EQ(refusal_of("[[[[[[[[[1"), "the JSON is nested more than 8 deep");
  EXPECT_EQ(refusal_of("[{\"a\":1,\"a\":2}]"), "the JSON has an object with the same key twice");
  // The grammar comes first.
  EXPECT_NE(refusal_of("[{\"a\":1,\"a\":2}").find("is not valid"), std::string::npos);
}

// `body` as a ModelInferRequest of the model m.
inference::ModelInferRequest message_of(const std::string& body, std::size_t json_bytes,
                                        RestEncodings* encodings = nullptr) {
  RestRequest request;
  const Status status =
      read_rest_request(body, json_bytes, {.name = "m", .version = "2", .verb = {}}, request);
  EXPECT_EQ(status.message, "");
  inference::ModelInferRequest message;
  EXPECT_TRUE(message.ParseFromString(request.message));
  if (encodings != nullptr) *encodings = request.encodings;
  return message;
}

template <typename Number>
std::string bytes_of(const std::vector<Number>& numbers) {
  std::string bytes(numbers.size() * sizeof(Number), '\0');
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

TEST(RestRequest, TakesTensorsEitherWay) {
  const std::string json =
      R"({"id": "a", "parameters": {"t": 5, "u": 18446744073709551615, "d": 1.5, "s": "x",
          "b": true, "binary_data_output": true},
          "inputs": [
            {"name": "f", "datatype": "FP32", "shape": [2, 2], "data": [[1, null], [0.1, -2e0]]},
            {"name": "i", "datatype": "INT64", "shape": [2],
             "data": [9223372036854775807, -9223372036854775808]},
            {"name": "l", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}},
            {"name": "s", "datatype": "BYTES", "shape": [2], "data": ["", "\u00e4"]}],
          "outputs": [{"name": "o", "parameters": {"binary_data": false}}, {"name": "p"}]})";
  RestEncodings encodings;
  const auto message = message_of(json + "abcd", json.size(), &encodings);
  EXPECT_EQ(message.model_name() + message.model_version() + message.id(), "m2a");
  EXPECT_EQ(message.parameters().size(), 5u);
  EXPECT_EQ(message.parameters().at("t").int64_param(), 5);
  EXPECT_EQ(message.parameters().at("u").uint64_param(), UINT64_MAX);
  EXPECT_EQ(message.parameters().at("d").double_param(), 1.5);
  EXPECT_EQ(message.parameters().at("s").string_param(), "x");
  EXPECT_TRUE(message.parameters().at("b").bool_param());
  ASSERT_EQ(message.raw_input_contents_size(), 4);
  const float missing = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(message.raw_input_contents(0), bytes_of<float>({1, missing, 0.1F, -2}));
  EXPECT_EQ(message.raw_input_contents(1), bytes_of<std::int64_t>({INT64_MAX, INT64_MIN}));
  EXPECT_EQ(message.raw_input_contents(2), "abcd");
  EXPECT_EQ(message.raw_input_contents(3), std::string("\0\0\0\0\2\0\0\0\xc3\xa4", 10));
  EXPECT_TRUE(message.inputs(2).parameters().empty());
  EXPECT_TRUE(message.outputs(0).parameters().empty());
  EXPECT_FALSE(encodings.binary("o"));
  EXPECT_TRUE(encodings.binary("p"));
}

TEST(RestRequest, AnswersThatAreNamedMoreThanOnceGoByTheLast) {
  RestEncodings encodings;
  const std::string json = R"({"inputs": [], "outputs": [{"name": "o"}]})";
  message_of(json, json.size(), &encodings);
  EXPECT_FALSE(encodings.binary("o"));
}

TEST(RestResponse, GivesEveryBit) {
  inference::ModelInferResponse response;
  response.set_model_name("a \"name\"");
  response.set_model_version("3");
  (*response.mutable_parameters())["commit"].set_int64_param(7);
  std::vector<float> scores = {0.1F,    1,     1e-45F,
                               3.4e38F, -0.0F, std::bit_cast<float>(std::uint32_t{0x15ae43fd})};
  for (std::uint32_t bits = 1; bits < 0x7f800000; bits += 999'983) {
    scores.push_back(std::bit_cast<float>(bits));
  }
  for (const char* name : {"o", "p"}) {
    auto& output = *response.add_outputs();
    output.set_name(name);
    output.set_datatype("FP32");
    output.add_shape(static_cast<std::int64_t>(scores.size()));
    response.add_raw_output_contents(bytes_of(scores));
  }
  response.add_outputs()->set_name("q");
  response.add_raw_output_contents("");
  const HttpAnswer answer = rest_answer(response.SerializeAsString(),
                                        {.all = false, .named = {{"p", true}}, .placed = {"q"}});
  EXPECT_EQ(answer.content_type, "application/octet-stream");
  ASSERT_TRUE(answer.json_bytes.has_value());
  EXPECT_EQ(answer.body.substr(*answer.json_bytes), bytes_of(scores));
  const Json json = Json::parse(answer.body.substr(0, *answer.json_bytes));
  EXPECT_EQ(json["model_name"], "a \"name\"");
  EXPECT_EQ(json["parameters"]["commit"], 7);
  EXPECT_FALSE(json.contains("id"));
  EXPECT_EQ(json["outputs"][1]["parameters"]["binary_data_size"], 4 * scores.size());
  std::vector<float> read;
  for (const Json& one : json["outputs"][0]["data"]) {
    read.push_back(static_cast<float>(one.get<double>()));
  }
  EXPECT_TRUE(bytes_of(read) == bytes_of(scores));
  // In shared memory.
  EXPECT_EQ(json["outputs"][2]["name"], "q");
  EXPECT_FALSE(json["outputs"][2].contains("data"));
  EXPECT_FALSE(json["outputs"][2].contains("parameters"));
}

TEST(RestResponse, WhatIsNotFiniteIsNull) {
  inference::ModelInferResponse response;
  response.add_outputs()->set_name("o");
  response.add_raw_output_contents(
      bytes_of<float>({std::numeric_limits<float>::quiet_NaN(), 2, INFINITY, -INFINITY}));
  const HttpAnswer answer = rest_answer(response.SerializeAsString(), {});
  EXPECT_EQ(answer.content_type, "application/json");
  EXPECT_FALSE(answer.json_bytes.has_value());
  EXPECT_NE(answer.body.find("\"data\":[null,2.0,null,null]"), std::string::npos) << answer.body;
}

TEST(RestPages, ReadPaths) {
  const auto read = [](const std::string& path) {
    const auto found = read_model_path(path);
    return found ? found->name + "|" + found->version + "|" + found->verb : "none";
  };
  EXPECT_EQ(read("/v2/models/a"), "a||");
  EXPECT_EQ(read("/v2/models/a%20b%2/versions/1/infer"), "a b%2|1|infer");
  EXPECT_EQ(read("/v2/models/a/infer"), "a||infer");
  for (const char* other : {"/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/a/",
                            "/v2/models/a/versions", "/v2/models/a/versions//infer",
                            "/v2/models/a/infer/b", "/v2/models/a/versions/1/2/infer"}) {
    EXPECT_EQ(read(other), "none") << other;
  }
}

}  // namespace
}  // namespace tessera
