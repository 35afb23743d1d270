#include "request/wire.h"

#include <cstring>

#include "request/utf8.h"
#include "request/wire_reader.h"

namespace tessera {
namespace {

bool read_int32(WireReader& reader, std::int32_t& value) {
  std::uint64_t wide = 0;
  if (!reader.varint(wide)) return false;
  value = static_cast<std::int32_t>(static_cast<std::uint32_t>(wide));
  return true;
}

bool read_string(WireReader& reader, std::string_view& value) {
  Bytes bytes;
  if (!reader.bytes(bytes)) return false;
  value = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  return is_utf8(value);
}

// Calls handle(reader, tag, handled) for every field and skips those that it leaves.
template <typename Handle>
bool read_fields(WireReader reader, const Handle& handle) {
  while (!reader.done()) {
    Tag tag;
    if (!reader.tag(tag)) return false;
    bool handled = true;
    if (!handle(reader, tag, handled)) return false;
    if (!handled && !reader.skip(tag)) return false;
  }
  return true;
}

bool is(Tag tag, std::uint32_t field, WireType type) {
  return tag.field == field && tag.type == type;
}

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

bool read_sparse_features(WireReader& outer, SparseFeaturesView& view) {
  Bytes message;
  if (!outer.bytes(message)) return false;
  view.present = true;
  view.message_bytes += message.size();
  return read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kVarint)) return read_int32(reader, view.num_features);
    if (is(tag, 2, WireType::kBytes)) return reader.bytes(view.lengths);
    if (is(tag, 3, WireType::kBytes)) return reader.bytes(view.values);
    if (is(tag, 4, WireType::kBytes)) return reader.bytes(view.weights);
    if (is(tag, 100, WireType::kBytes)) return reader.bytes(view.values_int64);
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
    if (is(tag, 3, WireType::kBytes)) return read_sparse_features(reader, view.features);
    if (is(tag, 4, WireType::kBytes)) return reader.bytes(view.row_index);
    handled = false;
    return true;
  });
}

// ---- writing ----

std::size_t varint_bytes(std::uint64_t value) {
  std::size_t count = 1;
  for (; value >= 0x80; value >>= 7) ++count;
  return count;
}

class WireWriter {
 public:
  explicit WireWriter(std::byte* out) : at_(out) {}

  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) *at_++ = static_cast<std::byte>(value | 0x80);
    *at_++ = static_cast<std::byte>(value);
  }

  void tag(std::uint32_t field, WireType type) {
    varint(std::uint64_t{field} << 3 | static_cast<std::uint64_t>(type));
  }

  void raw(const void* data, std::size_t bytes) {
    if (bytes > 0) std::memcpy(at_, data, bytes);
    at_ += bytes;
  }

 private:
  std::byte* at_;
};

std::size_t tag_bytes(std::uint32_t field) { return varint_bytes(std::uint64_t{field} << 3); }

std::size_t delimited_bytes(std::uint32_t field, std::size_t content) {
  return tag_bytes(field) + varint_bytes(content) + content;
}

// proto3 leaves out fields that have their default.
std::size_t optional_bytes(std::uint32_t field, std::size_t content) {
  return content == 0 ? 0 : delimited_bytes(field, content);
}

void write_string(WireWriter& writer, std::uint32_t field, std::string_view value) {
  if (value.empty()) return;
  writer.tag(field, WireType::kBytes);
  writer.varint(value.size());
  writer.raw(value.data(), value.size());
}

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

}  // namespace

bool parse_request(Bytes message, PredictionRequestView& view) {
  view = {};
  return read_fields(WireReader(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kVarint)) return read_int32(reader, view.batch_size);
    if (is(tag, 2, WireType::kBytes)) return read_float_features(reader, view.float_features);
    if (is(tag, 3, WireType::kBytes)) return read_sparse_features(reader, view.id_list_features);
    if (is(tag, 4, WireType::kBytes)) {
      return read_sparse_features(reader, view.id_score_list_features);
    }
    if (is(tag, 5, WireType::kBytes)) return read_float_features(reader, view.embedding_features);
    if (is(tag, 6, WireType::kBytes)) return read_sparse_features(reader, view.unary_features);
    if (is(tag, 100, WireType::kBytes)) return read_string(reader, view.model_name);
    if (is(tag, 101, WireType::kBytes)) return read_string(reader, view.model_version);
    if (is(tag, 102, WireType::kVarint)) return read_int32(reader, view.priority);
    if (is(tag, 103, WireType::kBytes)) return read_shared_features(reader, view.shared_features);
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
}

}  // namespace tessera
