#include "request/infer_wire.h"

#include <algorithm>

#include "request/wire_reader.h"
#include "request/wire_writer.h"

namespace tessera {
namespace {

// Field numbers of InferInputTensor.
constexpr std::uint32_t kShape = 3;
constexpr std::uint32_t kContents = 5;
// Field numbers of ModelInferRequest.
constexpr std::uint32_t kOutputs = 6;

bool read_parameter(WireReader& outer, ParameterView& view) {
  using Kind = ParameterView::Kind;
  Bytes message;
  if (!outer.bytes(message)) return false;
  return read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kVarint)) {
      view.kind = Kind::kBool;
      return reader.varint(view.number);
    }
    if (is(tag, 2, WireType::kVarint)) {
      view.kind = Kind::kInt64;
      return reader.varint(view.number);
    }
    if (is(tag, 3, WireType::kBytes)) {
      view.kind = Kind::kString;
      return read_string(reader, view.string);
    }
    if (is(tag, 5, WireType::kVarint)) {
      view.kind = Kind::kUint64;
      return reader.varint(view.number);
    }
    if (is(tag, 4, WireType::kFixed64)) view.kind = Kind::kDouble;
    handled = false;
    return true;
  });
}

// An entry of a map<string, InferParameter>. One with unknown fields is passed over, as Python's
// parser does (C++'s passes over those fields): it has no key then.
bool read_entry(WireReader& outer, ParameterView& view) {
  Bytes message;
  if (!outer.bytes(message)) return false;
  view = {};
  bool known = true;
  const bool good =
      read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
        if (is(tag, 1, WireType::kBytes)) return read_string(reader, view.key);
        if (is(tag, 2, WireType::kBytes)) return read_parameter(reader, view);
        handled = known = false;
        return true;
      });
  if (!known) view = {};
  return good;
}

// Keeps the key that is first in the alphabet among those that must not be ignored.
void note(std::string_view& unsupported, std::string_view key) {
  if (!key.starts_with("shared_memory_") && key != "classification") return;
  if (unsupported.empty() || key < unsupported) unsupported = key;
}

// Calls add(value) for every varint of a repeated field, packed or not.
template <typename Add>
bool read_varints(WireReader& reader, Tag tag, const Add& add) {
  std::uint64_t value = 0;
  if (tag.type == WireType::kVarint) {
    if (!reader.varint(value)) return false;
    add(value);
    return true;
  }
  Bytes packed;
  if (!reader.bytes(packed)) return false;
  WireReader numbers(packed);
  while (!numbers.done()) {
    if (!numbers.varint(value)) return false;
    add(value);
  }
  return true;
}

bool varints(Tag tag) { return tag.type == WireType::kVarint || tag.type == WireType::kBytes; }

// Calls add(bytes) for every run of numbers of `width` bytes of a repeated field, packed or not.
template <typename Add>
bool read_fixed(WireReader& reader, Tag tag, std::size_t width, const Add& add) {
  Bytes run;
  if (tag.type == WireType::kBytes) {
    if (!reader.bytes(run) || run.size() % width != 0) return false;
  } else if (!reader.fixed(width, run)) {
    return false;
  }
  add(run);
  return true;
}

bool fixed(Tag tag, WireType single) { return tag.type == single || tag.type == WireType::kBytes; }

// Counts the elements of each field.
bool count_contents(WireReader& outer, InferTensorView& view) {
  Bytes message;
  if (!outer.bytes(message)) return false;
  return read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (tag.field >= 1 && tag.field <= kContentFields.size()) {
      std::size_t& count = view.counts[tag.field - 1];
      switch (static_cast<ContentField>(tag.field - 1)) {
        case ContentField::kBool:
        case ContentField::kInt:
        case ContentField::kInt64:
        case ContentField::kUint:
        case ContentField::kUint64:
          if (varints(tag)) return read_varints(reader, tag, [&](std::uint64_t) { ++count; });
          break;
        case ContentField::kFp32:
          if (fixed(tag, WireType::kFixed32)) {
            return read_fixed(reader, tag, 4, [&](Bytes run) { count += run.size() / 4; });
          }
          break;
        case ContentField::kFp64:
          if (fixed(tag, WireType::kFixed64)) {
            return read_fixed(reader, tag, 8, [&](Bytes run) { count += run.size() / 8; });
          }
          break;
        case ContentField::kBytes:
          if (tag.type == WireType::kBytes) {
            Bytes element;
            ++count;
            return reader.bytes(element);
          }
          break;
      }
    }
    handled = false;
    return true;
  });
}

bool read_input(WireReader& outer, InferTensorView& view) {
  view = {};
  if (!outer.bytes(view.message)) return false;
  return read_fields(outer.inside(view.message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kBytes)) return read_string(reader, view.name);
    if (is(tag, 2, WireType::kBytes)) return read_string(reader, view.datatype);
    if (tag.field == kShape && varints(tag)) {
      return read_varints(reader, tag, [&](std::uint64_t value) {
        if (view.rank < view.kMaxRank) view.dims[view.rank] = static_cast<std::int64_t>(value);
        ++view.rank;
      });
    }
    if (is(tag, 4, WireType::kBytes)) {
      ParameterView parameter;
      if (!read_entry(reader, parameter)) return false;
      note(view.unsupported, parameter.key);
      return true;
    }
    if (is(tag, kContents, WireType::kBytes)) return count_contents(reader, view);
    handled = false;
    return true;
  });
}

bool read_output(WireReader& outer, InferRequestView& view) {
  Bytes message;
  if (!outer.bytes(message)) return false;
  ++view.outputs;
  std::string_view name;
  std::string_view unsupported;
  const bool good =
      read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
        if (is(tag, 1, WireType::kBytes)) return read_string(reader, name);
        if (is(tag, 2, WireType::kBytes)) {
          ParameterView parameter;
          if (!read_entry(reader, parameter)) return false;
          note(unsupported, parameter.key);
          return true;
        }
        handled = false;
        return true;
      });
  if (view.unsupported_parameter.empty() && !unsupported.empty()) {
    view.unsupported_output = name;
    view.unsupported_parameter = unsupported;
  }
  return good;
}

bool read_request_parameter(WireReader& reader, InferRequestView& view) {
  ParameterView parameter;
  if (!read_entry(reader, parameter)) return false;
  if (parameter.key == "timeout") view.timeout = parameter;
  if (parameter.key == "priority") view.priority = parameter;
  if (parameter.key == "sequence_id") view.sequence_id = parameter;
  if (parameter.key == "traffic_key") view.traffic_key = parameter;
  return true;
}

}  // namespace

bool parse_infer(Bytes message, InferRequestView& view) {
  view = {};
  view.message = message;
  return read_fields(WireReader(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kBytes)) return read_string(reader, view.model_name);
    if (is(tag, 2, WireType::kBytes)) return read_string(reader, view.model_version);
    if (is(tag, 3, WireType::kBytes)) return read_string(reader, view.id);
    if (is(tag, 4, WireType::kBytes)) return read_request_parameter(reader, view);
    if (is(tag, 5, WireType::kBytes)) {
      InferTensorView beyond;
      const std::size_t at = view.inputs++;
      return read_input(reader, at < view.kMaxInputs ? view.input[at] : beyond);
    }
    if (is(tag, kOutputs, WireType::kBytes)) return read_output(reader, view);
    if (is(tag, 7, WireType::kBytes)) {
      Bytes beyond;
      const std::size_t at = view.raw_contents++;
      return reader.bytes(at < view.kMaxInputs ? view.raw_content[at] : beyond);
    }
    handled = false;
    return true;
  });
}

void read_output_names(const InferRequestView& view, std::size_t most,
                       std::vector<std::string_view>& names) {
  names.clear();
  read_fields(WireReader(view.message), [&](WireReader& reader, Tag tag, bool& handled) {
    handled = false;
    if (!is(tag, kOutputs, WireType::kBytes) || names.size() == most) return true;
    handled = true;
    Bytes message;
    reader.bytes(message);
    std::string_view name;
    read_fields(reader.inside(message), [&](WireReader& inner, Tag field, bool& known) {
      known = is(field, 1, WireType::kBytes);
      return !known || read_string(inner, name);
    });
    names.push_back(name);
    return true;
  });
}

Bytes read_contents(const InferTensorView& tensor, ContentField field,
                    std::vector<std::byte>& storage) {
  const std::size_t width = field == ContentField::kInt64 ? 8 : 4;
  const std::size_t expected = tensor.counts[static_cast<std::size_t>(field)] * width;
  Bytes whole;  // all of it, where it lies in one run of the message
  std::size_t at = 0;
  // Where the next `bytes` bytes go.
  const auto next = [&](std::size_t bytes) {
    if (at == 0) storage.resize(expected);
    at += bytes;
    return storage.data() + at - bytes;
  };
  read_fields(WireReader(tensor.message), [&](WireReader& outer, Tag of_tensor, bool& known) {
    known = is(of_tensor, kContents, WireType::kBytes);
    if (!known) return true;
    Bytes message;
    outer.bytes(message);
    return read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
      handled = tag.field == static_cast<std::uint32_t>(field) + 1;
      if (handled && field == ContentField::kFp32) {
        handled = fixed(tag, WireType::kFixed32);
        if (!handled) return true;
        return read_fixed(reader, tag, width, [&](Bytes run) {
          if (run.size() == expected) {
            whole = run;
          } else {
            std::copy(run.begin(), run.end(), next(run.size()));
          }
        });
      }
      handled = handled && varints(tag);
      if (!handled) return true;
      return read_varints(reader, tag, [&](std::uint64_t value) {
        if (width == 8) {
          std::memcpy(next(8), &value, 8);
        } else {
          std::memcpy(next(4), &value, 4);
        }
      });
    });
  });
  if (expected == 0) return {};
  return whole.empty() ? Bytes(storage).first(expected) : whole;
}

namespace {

// How an output's shape and contents are written: [samples], or [samples, width].
struct OutputSizes {
  OutputSizes(const OutputView& output, std::int64_t B)
      : samples(static_cast<std::uint64_t>(B)),
        width(output.count / samples),
        shape(varint_bytes(samples) + (width > 1 ? varint_bytes(width) : 0)),
        message(delimited_bytes(1, output.name.size()) + delimited_bytes(2, kDatatype.size()) +
                delimited_bytes(kShape, shape)),
        content(output.count * sizeof(float)) {}

  static constexpr std::string_view kDatatype = "FP32";
  std::uint64_t samples;
  std::uint64_t width;
  std::size_t shape;
  std::size_t message;
  std::size_t content;
};

constexpr std::uint32_t kParameters = 4;
constexpr std::uint32_t kAnswered = 5;
constexpr std::uint32_t kRaw = 6;

// The map's entry "commit": its key, and an InferParameter whose int64_param is the number, which
// is written also where it is 0, as that of a oneof is.
struct CommitSizes {
  explicit CommitSizes(std::int64_t commit)
      : number(static_cast<std::uint64_t>(commit)),
        parameter(tag_bytes(kInt64Parameter) + varint_bytes(number)),
        entry(delimited_bytes(1, kKey.size()) + delimited_bytes(2, parameter)) {}

  static constexpr std::string_view kKey = "commit";
  static constexpr std::uint32_t kInt64Parameter = 2;
  std::uint64_t number;
  std::size_t parameter;
  std::size_t entry;
};

void write_commit(WireWriter& writer, std::int64_t commit) {
  const CommitSizes sizes(commit);
  writer.tag(kParameters, WireType::kBytes);
  writer.varint(sizes.entry);
  write_string(writer, 1, CommitSizes::kKey);
  writer.tag(2, WireType::kBytes);
  writer.varint(sizes.parameter);
  writer.tag(CommitSizes::kInt64Parameter, WireType::kVarint);
  writer.varint(sizes.number);
}

}  // namespace

std::size_t infer_response_bytes(const InferResponseParts& parts) {
  std::size_t bytes = optional_bytes(1, parts.model_name.size()) +
                      optional_bytes(2, parts.model_version.size()) +
                      optional_bytes(3, parts.id.size());
  if (parts.commit.has_value()) {
    bytes += delimited_bytes(kParameters, CommitSizes(*parts.commit).entry);
  }
  for (const std::size_t index : parts.chosen) {
    const OutputSizes sizes(parts.outputs[index], parts.samples);
    bytes += delimited_bytes(kAnswered, sizes.message) + delimited_bytes(kRaw, sizes.content);
  }
  return bytes;
}

void write_infer_response(const InferResponseParts& parts, std::byte* out) {
  WireWriter writer(out);
  write_string(writer, 1, parts.model_name);
  write_string(writer, 2, parts.model_version);
  write_string(writer, 3, parts.id);
  if (parts.commit.has_value()) write_commit(writer, *parts.commit);
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
  for (const std::size_t index : parts.chosen) {
    const OutputView& output = parts.outputs[index];
    writer.tag(kRaw, WireType::kBytes);
    writer.varint(output.count * sizeof(float));
    writer.raw(output.data, output.count * sizeof(float));
  }
}

}  // namespace tessera
