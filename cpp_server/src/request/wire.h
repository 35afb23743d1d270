// Protocol Buffers' wire format, as far as protos/predictor.proto needs it: requests are read
// as views of the message's bytes and answers are written in one pass into memory of exactly
// their size, so that no field is copied into a message object on the way.
//
// The reader accepts what protobuf's own parser accepts (fields in any order and more than
// once, embedded messages that come in pieces, unknown fields and groups, varints of any
// length) and refuses what it refuses; tests hold the two against each other. (Where protobuf's
// parsers differ, on tags of more than 32 bits, it refuses like Python's.)
// Source: https://protobuf.dev/programming-guides/encoding/
//
// Contract: views borrow the message's bytes. Nothing throws or blocks; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "request/bytes.h"
#include "request/strings.h"

namespace tessera {

struct FloatFeaturesView {
  bool present = false;
  std::size_t message_bytes = 0;  // of the embedded messages as they came
  std::int32_t num_features = 0;
  Bytes values;
};

struct SparseFeaturesView {
  bool present = false;
  std::size_t message_bytes = 0;
  std::int32_t num_features = 0;
  Bytes lengths;
  Bytes values;
  Bytes weights;
  Bytes values_int64;
  StringsView values_bytes;
};

struct SharedFeaturesView {
  bool present = false;
  std::vector<std::string_view> names;
  std::int32_t num_rows = 0;
  SparseFeaturesView features;
  Bytes row_index;
};

struct PredictionRequestView {
  std::int32_t batch_size = 0;
  FloatFeaturesView float_features;
  SparseFeaturesView id_list_features;
  SparseFeaturesView id_score_list_features;
  FloatFeaturesView embedding_features;
  SparseFeaturesView unary_features;
  std::string_view model_name;
  std::string_view model_version;
  std::int32_t priority = 0;
  SharedFeaturesView shared_features;
  std::string_view traffic_key;
};

// Reads `message` into `view`, which is overwritten. False: it is not a valid PredictionRequest.
bool parse_request(Bytes message, PredictionRequestView& view);

// One output of an answer: `count` float32 numbers.
struct OutputView {
  std::string_view name;
  const float* data = nullptr;
  std::size_t count = 0;
};

// Where one request's time went, and who shared its batch: StageTimings of the protocol.
struct StageTimings {
  std::int64_t decode_us = 0;
  std::int64_t queue_us = 0;
  std::int64_t assemble_us = 0;
  std::int64_t transfer_us = 0;
  std::int64_t forward_us = 0;
  std::int64_t split_us = 0;
  std::int32_t batch_requests = 0;
  std::int32_t batch_samples = 0;
};

// A PredictionResponse that is about to be written. The views are borrowed.
struct ResponseParts {
  std::span<const OutputView> outputs;
  std::string_view model_name;
  std::string_view model_version;
  StageTimings timings;
  // The commit of the version's log that the outputs were computed with (0: the package itself);
  // nothing where the version follows none.
  std::optional<std::int64_t> commit = {};
};

// Bytes that write_response will write for `parts`.
std::size_t response_bytes(const ResponseParts& parts);

// Writes the message into `out`, which holds response_bytes(parts) bytes.
void write_response(const ResponseParts& parts, std::byte* out);

}  // namespace tessera
