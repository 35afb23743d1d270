#include "request/wire.h"

#include <array>

#include "request/wire_reader.h"
#include "request/wire_writer.h"

namespace tessera {
namespace {

bool read_float_features(WireReader& outer, FloatFeaturesView& view) {
  Bytes message;
  if (!outer.bytes(message)) return false;
  view.present = true;
  view.message_bytes += message.size();
  return read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kVarint)) return read_int32(reader, view.num_features);
    if (is(tag, 2, WireType::kBytes)) return reader.bytes(view.values);
    handled = false;
    return true;
  });
}

// `path` leads to the message's fields from the request on; its last place is still empty.
bool read_sparse_features(WireReader& outer, std::array<std::uint32_t, 3> path,
                          SparseFeaturesView& view) {
  constexpr std::uint32_t kValuesBytes = 101;
  Bytes message;
  if (!outer.bytes(message)) return false;
  path[path[1] == 0 ? 1 : 2] = kValuesBytes;
  view.values_bytes.path = path;
  view.present = true;
  view.message_bytes += message.size();
  return read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kVarint)) return read_int32(reader, view.num_features);
    if (is(tag, 2, WireType::kBytes)) return reader.bytes(view.lengths);
    if (is(tag, 3, WireType::kBytes)) return reader.bytes(view.values);
    if (is(tag, 4, WireType::kBytes)) return reader.bytes(view.weights);
    if (is(tag, 100, WireType::kBytes)) return reader.bytes(view.values_int64);
    if (is(tag, kValuesBytes, WireType::kBytes)) {
      Bytes string;
      ++view.values_bytes.count;
      return reader.bytes(string);
    }
    handled = false;
    return true;
  });
}

bool read_shared_features(WireReader& outer, SharedFeaturesView& view) {
  Bytes message;
  if (!outer.bytes(message)) return false;
  view.present = true;
  return read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kBytes)) {
      view.names.emplace_back();
      return read_string(reader, view.names.back());
    }
    if (is(tag, 2, WireType::kVarint)) return read_int32(reader, view.num_rows);
    if (is(tag, 3, WireType::kBytes)) return read_sparse_features(reader, {103, 3}, view.features);
    if (is(tag, 4, WireType::kBytes)) return reader.bytes(view.row_index);
    handled = false;
    return true;
  });
}

// ---- writing ----

// FloatVec { repeated float data = 1 [packed] }
std::size_t vector_bytes(const OutputView& output) {
  return optional_bytes(1, output.count * sizeof(float));
}

// The map's entry: key = 1, value = 2, both always written.
std::size_t entry_bytes(const OutputView& output) {
  return delimited_bytes(1, output.name.size()) + delimited_bytes(2, vector_bytes(output));
}

template <typename Visit>
void visit_timings(const StageTimings& timings, const Visit& visit) {
  // Negative times cannot be: every stage is a difference of a monotonic clock.
  visit(1U, static_cast<std::uint64_t>(timings.decode_us));
  visit(2U, static_cast<std::uint64_t>(timings.queue_us));
  visit(3U, static_cast<std::uint64_t>(timings.assemble_us));
  visit(4U, static_cast<std::uint64_t>(timings.transfer_us));
  visit(5U, static_cast<std::uint64_t>(timings.forward_us));
  visit(6U, static_cast<std::uint64_t>(timings.split_us));
  visit(7U, static_cast<std::uint64_t>(timings.batch_requests));
  visit(8U, static_cast<std::uint64_t>(timings.batch_samples));
}

std::size_t timings_bytes(const StageTimings& timings) {
  std::size_t bytes = 0;
  visit_timings(timings, [&](std::uint32_t field, std::uint64_t value) {
    if (value != 0) bytes += tag_bytes(field) + varint_bytes(value);
  });
  return bytes;
}

constexpr std::uint32_t kPredictions = 1;
constexpr std::uint32_t kModelName = 100;
constexpr std::uint32_t kModelVersion = 101;
constexpr std::uint32_t kTimings = 102;
constexpr std::uint32_t kModelCommit = 103;

std::uint64_t commit_of(const ResponseParts& parts) {
  return static_cast<std::uint64_t>(parts.commit.value_or(0));
}

}  // namespace

bool parse_request(Bytes message, PredictionRequestView& view) {
  view = {};
  for (SparseFeaturesView* const group :
       {&view.id_list_features, &view.id_score_list_features, &view.shared_features.features}) {
    group->values_bytes.message = message;
  }
  return read_fields(WireReader(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kVarint)) return read_int32(reader, view.batch_size);
    if (is(tag, 2, WireType::kBytes)) return read_float_features(reader, view.float_features);
    if (is(tag, 3, WireType::kBytes)) {
      return read_sparse_features(reader, {3}, view.id_list_features);
    }
    if (is(tag, 4, WireType::kBytes)) {
      return read_sparse_features(reader, {4}, view.id_score_list_features);
    }
    if (is(tag, 5, WireType::kBytes)) return read_float_features(reader, view.embedding_features);
    if (is(tag, 6, WireType::kBytes)) return read_sparse_features(reader, {6}, view.unary_features);
    if (is(tag, 100, WireType::kBytes)) return read_string(reader, view.model_name);
    if (is(tag, 101, WireType::kBytes)) return read_string(reader, view.model_version);
    if (is(tag, 102, WireType::kVarint)) return read_int32(reader, view.priority);
    if (is(tag, 103, WireType::kBytes)) return read_shared_features(reader, view.shared_features);
    if (is(tag, 104, WireType::kBytes)) return read_string(reader, view.traffic_key);
    handled = false;
    return true;
  });
}

std::size_t response_bytes(const ResponseParts& parts) {
  std::size_t bytes = optional_bytes(kModelName, parts.model_name.size()) +
                      optional_bytes(kModelVersion, parts.model_version.size()) +
                      delimited_bytes(kTimings, timings_bytes(parts.timings));
  for (const OutputView& output : parts.outputs) {
    bytes += delimited_bytes(kPredictions, entry_bytes(output));
  }
  const std::uint64_t commit = commit_of(parts);
  if (commit != 0) bytes += tag_bytes(kModelCommit) + varint_bytes(commit);
  return bytes;
}

void write_response(const ResponseParts& parts, std::byte* out) {
  WireWriter writer(out);
  for (const OutputView& output : parts.outputs) {
    writer.tag(kPredictions, WireType::kBytes);
    writer.varint(entry_bytes(output));
    writer.tag(1, WireType::kBytes);
    writer.varint(output.name.size());
    writer.raw(output.name.data(), output.name.size());
    writer.tag(2, WireType::kBytes);
    writer.varint(vector_bytes(output));
    if (output.count > 0) {
      writer.tag(1, WireType::kBytes);
      writer.varint(output.count * sizeof(float));
      writer.raw(output.data, output.count * sizeof(float));
    }
  }
  write_string(writer, kModelName, parts.model_name);
  write_string(writer, kModelVersion, parts.model_version);
  writer.tag(kTimings, WireType::kBytes);
  writer.varint(timings_bytes(parts.timings));
  visit_timings(parts.timings, [&](std::uint32_t field, std::uint64_t value) {
    if (value == 0) return;
    writer.tag(field, WireType::kVarint);
    writer.varint(value);
  });
  const std::uint64_t commit = commit_of(parts);
  if (commit == 0) return;
  writer.tag(kModelCommit, WireType::kVarint);
  writer.varint(commit);
}

}  // namespace tessera
