#include "request/infer_parameters.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/text.h"

namespace tessera {
namespace {

constexpr std::uint64_t kMostSigned = std::numeric_limits<std::int64_t>::max();

// A parameter that is a whole number from 0 to `most`; 0 where it is not there.
Status read_number(const ParameterView& parameter, std::uint64_t most, std::uint64_t& number) {
  using Kind = ParameterView::Kind;
  number = 0;
  if (parameter.key.empty()) return {};
  if (parameter.kind != Kind::kInt64 && parameter.kind != Kind::kUint64) {
    return Status::invalid(
        text("parameter '", parameter.key, "' is neither an int64_param nor a uint64_param"));
  }
  number = parameter.number;
  const auto with_sign = static_cast<std::int64_t>(number);
  const bool negative = parameter.kind == Kind::kInt64 && with_sign < 0;
  if (!negative && number <= most) return {};
  return Status::invalid(text("parameter '", parameter.key, "' is ",
                              negative ? text(with_sign) : text(number), ", expected 0 to ", most));
}

Status refuse_sequence(const ParameterView& parameter) {
  using Kind = ParameterView::Kind;
  if (parameter.key.empty()) return {};
  const bool number = parameter.kind == Kind::kInt64 || parameter.kind == Kind::kUint64;
  if (number && parameter.number == 0) return {};
  if (parameter.kind == Kind::kString && parameter.string.empty()) return {};
  return Status::invalid(
      "parameter 'sequence_id' is not supported: models keep no state between requests");
}

// A parameter that is true or false; false where it is not there.
Status read_flag(const ParameterView& parameter, bool& flag) {
  flag = false;
  if (parameter.key.empty()) return {};
  if (parameter.kind != ParameterView::Kind::kBool) {
    return Status::invalid(text("parameter '", parameter.key, "' is not a bool_param"));
  }
  flag = parameter.number != 0;
  return {};
}

}  // namespace

Status read_options(const InferRequestView& message, InferOptions& options) {
  constexpr std::uint64_t kLastPriority = 2'147'483'646;
  options = {};
  std::uint64_t micros = 0;
  std::uint64_t priority = 0;
  Status status = read_number(message.timeout, kMostSigned, micros);
  if (status.ok()) status = read_number(message.priority, kLastPriority, priority);
  if (status.ok()) status = refuse_sequence(message.sequence_id);
  if (status.ok()) status = read_flag(message.timings, options.timings);
  if (!status.ok()) return status;
  // A longer timeout is cut to what a Duration has room for, 292 years.
  options.timeout = std::chrono::microseconds(std::min(micros, kMostSigned / 1'000));
  if (priority > 0) options.priority = static_cast<std::int32_t>(kLastPriority + 1 - priority);
  return {};
}

Status of_tensor(const char* kind, std::string_view name, Status status) {
  status.message = text(kind, " '", name, "': ", status.message);
  return status;
}

Status check_parameters(const char* kind, std::string_view name, const RegionView& place,
                        std::string_view unsupported, bool may_be_placed) {
  if (!may_be_placed) {
    for (const ParameterView* one : {&place.region, &place.offset, &place.byte_size}) {
      if (one->key.empty()) continue;
      if (unsupported.empty() || one->key < unsupported) unsupported = one->key;
    }
  }
  if (unsupported.empty()) return {};
  return Status::invalid(
      text("parameter '", unsupported, "' of ", kind, " '", name, "' is not supported"));
}

Status locate(const char* kind, std::string_view name, const RegionView& place,
              const SharedMemory& memory, SharedSpan& span) {
  if (place.region.key.empty() || place.byte_size.key.empty()) {
    return of_tensor(kind, name,
                     Status::invalid("parameters 'shared_memory_region' and "
                                     "'shared_memory_byte_size' are needed together"));
  }
  if (place.region.kind != ParameterView::Kind::kString) {
    return of_tensor(kind, name,
                     Status::invalid("parameter 'shared_memory_region' is not a string"));
  }
  Status status = read_number(place.offset, kMostSigned, span.offset);
  if (status.ok()) status = read_number(place.byte_size, kMostSigned, span.byte_size);
  if (!status.ok()) return of_tensor(kind, name, std::move(status));
  span.region = memory.find(place.region.string);
  if (span.region == nullptr) {
    return of_tensor(kind, name,
                     {Code::kNotFound,
                      text("shared memory region '", place.region.string, "' is not registered")});
  }
  const std::uint64_t size = span.region->facts().byte_size;
  if (span.offset <= size && span.byte_size <= size - span.offset) return {};
  return of_tensor(kind, name,
                   Status::invalid(text("offset ", span.offset, " and byte size ", span.byte_size,
                                        " reach beyond shared memory region '", place.region.string,
                                        "', which has ", size, " bytes")));
}

}  // namespace tessera
