// The messages of KServe's ModelInfer on the wire (protos/inference.proto): a request is read as
// views of its bytes, and an answer is written in one pass, as wire.h does for Predict.
//
// A message of few bytes can name very many inputs, dimensions and outputs. So a view has room for
// those that a good request has, and counts the rest; numbers that stand one by one in a message
// (typed contents) are counted while it is read and decoded on demand.
//
// Contract: views borrow the message's bytes. Nothing throws or blocks; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "common/enums.h"
#include "request/shared_memory.h"
#include "request/wire.h"

namespace tessera {

// One entry of a map<string, InferParameter>.
struct ParameterView {
  enum class Kind { kNone, kBool, kInt64, kString, kDouble, kUint64 };

  std::string_view key;
  Kind kind = Kind::kNone;
  std::uint64_t number = 0;  // of kBool, kInt64 (two's complement) and kUint64
  std::string_view string;
};

// Where the parameters of a tensor say that it lies in shared memory; those that are not there have
// an empty key.
struct RegionView {
  ParameterView region;  // its name
  ParameterView offset;
  ParameterView byte_size;

  bool given() const {
    return !region.key.empty() || !offset.key.empty() || !byte_size.key.empty();
  }
};

// The fields of InferTensorContents, by their number less one.
enum class ContentField { kBool, kInt, kInt64, kUint, kUint64, kFp32, kFp64, kBytes };
inline constexpr auto kContentFields = std::to_array<std::string_view>(
    {"bool_contents", "int_contents", "int64_contents", "uint_contents", "uint64_contents",
     "fp32_contents", "fp64_contents", "bytes_contents"});
static_assert(kContentFields.size() == enum_size<ContentField::kBytes>());

// Where the strings of typed contents lie in an input's message.
inline constexpr std::array<std::uint32_t, 3> kTypedStrings = {
    5, static_cast<std::uint32_t>(ContentField::kBytes) + 1};

struct InferTensorView {
  static constexpr std::size_t kMaxRank = 2;

  std::string_view name;
  std::string_view datatype;
  std::size_t rank = 0;
  std::array<std::int64_t, kMaxRank> dims{};  // the first of `rank`
  RegionView place;
  std::string_view unsupported;  // another parameter that would have to be obeyed; or empty
  std::array<std::size_t, kContentFields.size()> counts{};  // elements of each content field
  Bytes message;                                            // all of it
};

struct InferRequestView {
  static constexpr std::size_t kMaxInputs = 7;  // one more than there are names of inputs

  std::string_view model_name;
  std::string_view model_version;
  std::string_view id;
  ParameterView timeout;  // these five have an empty key where they are not there
  ParameterView priority;
  ParameterView sequence_id;
  ParameterView traffic_key;
  ParameterView timings;
  std::size_t inputs = 0;
  std::size_t placed_inputs = 0;                    // of them: those that lie in shared memory
  std::array<InferTensorView, kMaxInputs> input{};  // the first of `inputs`
  std::size_t raw_contents = 0;
  std::array<Bytes, kMaxInputs> raw_content{};  // the first of `raw_contents`
  std::size_t outputs = 0;
  std::size_t placed_outputs = 0;  // of them: those that go into shared memory
  Bytes message;                   // all of it
};

// An output that is asked for.
struct InferOutputView {
  std::string_view name;
  RegionView place;
  std::string_view unsupported;  // as an input's
};

// Reads `message` into `view`, which is overwritten. False: it is not a valid ModelInferRequest.
bool parse_infer(Bytes message, InferRequestView& view);

// The first `most` requested outputs of a message that was parsed.
void read_outputs(const InferRequestView& view, std::size_t most,
                  std::vector<InferOutputView>& outputs);

// The number of the field raw_input_contents.
inline constexpr std::uint32_t kRawContents = 7;

// The elements of kFp32, kInt or kInt64 of a tensor that was parsed, as little-endian numbers of 4,
// 4 and 8 bytes: either where they lie in the message, or decoded into `storage`.
Bytes read_contents(const InferTensorView& tensor, ContentField field,
                    std::vector<std::byte>& storage);

// A ModelInferResponse that is about to be written. The views are borrowed.
struct InferResponseParts {
  std::span<const OutputView> outputs;  // of the model
  std::span<const std::size_t> chosen;  // which of them, in the order of the answer
  // Empty, or for each of `chosen` where its numbers go instead of into the message.
  std::span<const SharedSpan> places = {};
  std::int64_t samples = 0;
  std::string_view model_name;
  std::string_view model_version;
  std::string_view id;
  std::optional<std::int64_t> commit = {};  // see ResponseParts
  const StageTimings* timings = nullptr;    // null: the answer does not tell them
};

// Bytes that write_infer_response will write for `parts`.
std::size_t infer_response_bytes(const InferResponseParts& parts);

// Writes the message into `out`, which holds infer_response_bytes(parts) bytes.
void write_infer_response(const InferResponseParts& parts, std::byte* out);

}  // namespace tessera
