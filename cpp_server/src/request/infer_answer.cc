// The writer of a ModelInferResponse.
#include "request/infer_wire.h"
#include "request/wire_writer.h"

namespace tessera {
namespace {

// Field numbers of ModelInferResponse, and of its outputs.
constexpr std::uint32_t kParameters = 4;
constexpr std::uint32_t kAnswered = 5;
constexpr std::uint32_t kRaw = 6;
constexpr std::uint32_t kShape = 3;

// How many numbers of the output `at` of `chosen` the message has. One that goes elsewhere has an
// empty entry, so that the entries go on being in the order of the outputs.
std::size_t numbers_of(const InferResponseParts& parts, std::size_t at) {
  const bool placed = !parts.places.empty() && parts.places[at].region != nullptr;
  return placed ? 0 : parts.outputs[parts.chosen[at]].count;
}

// How an output's shape and contents are written: [samples], or [samples, width].
struct OutputSizes {
  OutputSizes(const OutputView& output, std::int64_t B)
      : samples(static_cast<std::uint64_t>(B)),
        width(output.count / samples),
        shape(varint_bytes(samples) + (width > 1 ? varint_bytes(width) : 0)),
        message(delimited_bytes(1, output.name.size()) + delimited_bytes(2, kDatatype.size()) +
                delimited_bytes(kShape, shape)) {}

  static constexpr std::string_view kDatatype = "FP32";
  std::uint64_t samples;
  std::uint64_t width;
  std::size_t shape;
  std::size_t message;
};

// An entry of the map of parameters: its key, and an InferParameter whose int64_param is the
// number, which is written also where it is 0, as that of a oneof is.
struct EntrySizes {
  EntrySizes(std::string_view key, std::int64_t value)
      : number(static_cast<std::uint64_t>(value)),
        parameter(tag_bytes(kInt64Parameter) + varint_bytes(number)),
        entry(delimited_bytes(1, key.size()) + delimited_bytes(2, parameter)) {}

  static constexpr std::uint32_t kInt64Parameter = 2;
  std::uint64_t number;
  std::size_t parameter;
  std::size_t entry;
};

// Visits the key and the number of each parameter of the answer.
template <typename Visit>
void visit_parameters(const InferResponseParts& parts, const Visit& visit) {
  if (parts.commit.has_value()) visit("commit", *parts.commit);
  if (parts.timings == nullptr) return;
  // Named like the fields of predictor.proto's StageTimings.
  const StageTimings& timings = *parts.timings;
  visit("decode_us", timings.decode_us);
  visit("queue_us", timings.queue_us);
  visit("assemble_us", timings.assemble_us);
  visit("transfer_us", timings.transfer_us);
  visit("forward_us", timings.forward_us);
  visit("split_us", timings.split_us);
  visit("batch_requests", std::int64_t{timings.batch_requests});
  visit("batch_samples", std::int64_t{timings.batch_samples});
}

void write_entry(WireWriter& writer, std::string_view key, std::int64_t value) {
  const EntrySizes sizes(key, value);
  writer.tag(kParameters, WireType::kBytes);
  writer.varint(sizes.entry);
  write_string(writer, 1, key);
  writer.tag(2, WireType::kBytes);
  writer.varint(sizes.parameter);
  writer.tag(EntrySizes::kInt64Parameter, WireType::kVarint);
  writer.varint(sizes.number);
}

}  // namespace

std::size_t infer_response_bytes(const InferResponseParts& parts) {
  std::size_t bytes = optional_bytes(1, parts.model_name.size()) +
                      optional_bytes(2, parts.model_version.size()) +
                      optional_bytes(3, parts.id.size());
  visit_parameters(parts, [&](std::string_view key, std::int64_t value) {
    bytes += delimited_bytes(kParameters, EntrySizes(key, value).entry);
  });
  for (std::size_t at = 0; at < parts.chosen.size(); ++at) {
    const OutputSizes sizes(parts.outputs[parts.chosen[at]], parts.samples);
    bytes += delimited_bytes(kAnswered, sizes.message) +
             delimited_bytes(kRaw, numbers_of(parts, at) * sizeof(float));
  }
  return bytes;
}

void write_infer_response(const InferResponseParts& parts, std::byte* out) {
  WireWriter writer(out);
  write_string(writer, 1, parts.model_name);
  write_string(writer, 2, parts.model_version);
  write_string(writer, 3, parts.id);
  visit_parameters(
      parts, [&](std::string_view key, std::int64_t value) { write_entry(writer, key, value); });
  for (const std::size_t index : parts.chosen) {
    const OutputView& output = parts.outputs[index];
    const OutputSizes sizes(output, parts.samples);
    writer.tag(kAnswered, WireType::kBytes);
    writer.varint(sizes.message);
    writer.tag(1, WireType::kBytes);
    writer.varint(output.name.size());
    writer.raw(output.name.data(), output.name.size());
    write_string(writer, 2, OutputSizes::kDatatype);
    writer.tag(kShape, WireType::kBytes);
    writer.varint(sizes.shape);
    writer.varint(sizes.samples);
    if (sizes.width > 1) writer.varint(sizes.width);
  }
  for (std::size_t at = 0; at < parts.chosen.size(); ++at) {
    const std::size_t bytes = numbers_of(parts, at) * sizeof(float);
    writer.tag(kRaw, WireType::kBytes);
    writer.varint(bytes);
    writer.raw(parts.outputs[parts.chosen[at]].data, bytes);
  }
}

}  // namespace tessera
