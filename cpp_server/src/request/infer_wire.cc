#include "request/infer_wire.h"

#include <algorithm>

#include "request/wire_reader.h"

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

// Keeps a tensor's parameter where it must not be ignored: one of shared memory in `place`, and of
// others the key that is first in the alphabet.
void note(RegionView& place, std::string_view& unsupported, const ParameterView& parameter) {
  const std::string_view key = parameter.key;
  if (key == "shared_memory_region") {
    place.region = parameter;
  } else if (key == "shared_memory_offset") {
    place.offset = parameter;
  } else if (key == "shared_memory_byte_size") {
    place.byte_size = parameter;
  } else if (key.starts_with("shared_memory_") || key == "classification") {
    if (unsupported.empty() || key < unsupported) unsupported = key;
  }
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
      note(view.place, view.unsupported, parameter);
      return true;
    }
    if (is(tag, kContents, WireType::kBytes)) return count_contents(reader, view);
    handled = false;
    return true;
  });
}

bool read_output(WireReader& outer, InferOutputView& view) {
  Bytes message;
  if (!outer.bytes(message)) return false;
  view = {};
  return read_fields(outer.inside(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (is(tag, 1, WireType::kBytes)) return read_string(reader, view.name);
    if (is(tag, 2, WireType::kBytes)) {
      ParameterView parameter;
      if (!read_entry(reader, parameter)) return false;
      note(view.place, view.unsupported, parameter);
      return true;
    }
    handled = false;
    return true;
  });
}

bool read_request_parameter(WireReader& reader, InferRequestView& view) {
  ParameterView parameter;
  if (!read_entry(reader, parameter)) return false;
  if (parameter.key == "timeout") view.timeout = parameter;
  if (parameter.key == "priority") view.priority = parameter;
  if (parameter.key == "sequence_id") view.sequence_id = parameter;
  if (parameter.key == "traffic_key") view.traffic_key = parameter;
  if (parameter.key == "timings") view.timings = parameter;
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
      InferTensorView& tensor = at < view.kMaxInputs ? view.input[at] : beyond;
      if (!read_input(reader, tensor)) return false;
      if (tensor.place.given()) ++view.placed_inputs;
      return true;
    }
    if (is(tag, kOutputs, WireType::kBytes)) {
      InferOutputView output;
      ++view.outputs;
      if (!read_output(reader, output)) return false;
      if (output.place.given()) ++view.placed_outputs;
      return true;
    }
    if (is(tag, kRawContents, WireType::kBytes)) {
      Bytes beyond;
      const std::size_t at = view.raw_contents++;
      return reader.bytes(at < view.kMaxInputs ? view.raw_content[at] : beyond);
    }
    handled = false;
    return true;
  });
}

void read_outputs(const InferRequestView& view, std::size_t most,
                  std::vector<InferOutputView>& outputs) {
  outputs.clear();
  read_fields(WireReader(view.message), [&](WireReader& reader, Tag tag, bool& handled) {
    handled = is(tag, kOutputs, WireType::kBytes) && outputs.size() < most;
    return !handled || read_output(reader, outputs.emplace_back());
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

}  // namespace tessera
