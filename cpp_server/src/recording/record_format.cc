#include "recording/record_format.h"

#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

constexpr std::string_view kMagic = "TESSREC\n";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kPrefixBytes = 8;  // the body's size and its sum
constexpr std::size_t kSumAt = 4;        // of a record
constexpr std::size_t kFixedBytes = 16;  // of a body before the names

template <typename Number>
void append(std::string& bytes, Number number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// The number at the beginning of `bytes`, which holds it, and lets it go.
template <typename Number>
Number take(std::string_view& bytes) {
  Number number{};
  std::memcpy(&number, bytes.data(), sizeof number);
  bytes.remove_prefix(sizeof number);
  return number;
}

std::string_view take_text(std::string_view& bytes, std::size_t size) {
  const std::string_view text = bytes.substr(0, size);
  bytes.remove_prefix(size);
  return text;
}

std::uint32_t sum_of(std::string_view bytes) {
  return static_cast<std::uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace

bool is_recording_name(std::string_view name) {
  return name.starts_with("requests-") && name.ends_with(".rec");
}

std::string recording_header(const RecordingHeader& header) {
  std::string bytes(kMagic);
  append(bytes, kVersion);
  append(bytes, header.process);
  append(bytes, header.start_unix_ns);
  append(bytes, header.share);
  append(bytes, sum_of(bytes));
  return bytes;
}

std::optional<RecordingHeader> read_recording_header(std::string_view file) {
  if (file.size() < kRecordingHeaderBytes) return std::nullopt;
  std::string_view bytes = file.substr(0, kRecordingHeaderBytes);
  const std::uint32_t sum = sum_of(bytes.substr(0, bytes.size() - sizeof sum));
  if (take_text(bytes, kMagic.size()) != kMagic) return std::nullopt;
  if (take<std::uint32_t>(bytes) != kVersion) return std::nullopt;
  RecordingHeader header;
  header.process = take<std::uint32_t>(bytes);
  header.start_unix_ns = take<std::int64_t>(bytes);
  header.share = take<double>(bytes);
  if (take<std::uint32_t>(bytes) != sum) return std::nullopt;
  return header;
}

std::string unsealed_record(const RecordedCall& call) {
  std::string record;
  if (std::max({call.model.size(), call.version.size(), call.request_id.size()}) > kMostNameBytes) {
    return record;
  }
  const std::size_t body = kFixedBytes + call.model.size() + call.version.size() +
                           call.request_id.size() + call.message.size();
  if (body > std::numeric_limits<std::uint32_t>::max()) return record;
  record.reserve(kPrefixBytes + body);
  append(record, static_cast<std::uint32_t>(body));
  append(record, std::uint32_t{0});
  append(record, call.arrival_ns);
  append(record, static_cast<std::uint8_t>(call.method));
  append(record, static_cast<std::uint8_t>(call.protocol));
  append(record, static_cast<std::uint16_t>(call.model.size()));
  append(record, static_cast<std::uint16_t>(call.version.size()));
  append(record, static_cast<std::uint16_t>(call.request_id.size()));
  for (const std::string_view part : {call.model, call.version, call.request_id, call.message}) {
    record += part;
  }
  return record;
}

void seal_record(std::string& record) {
  const std::uint32_t sum = sum_of(std::string_view(record).substr(kPrefixBytes));
  std::memcpy(&record[kSumAt], &sum, sizeof sum);
}

std::optional<RecordedCall> take_record(std::string_view& rest) {
  if (rest.size() < kPrefixBytes) return std::nullopt;
  std::string_view bytes = rest;
  const auto size = take<std::uint32_t>(bytes);
  const auto sum = take<std::uint32_t>(bytes);
  if (size < kFixedBytes || size > bytes.size()) return std::nullopt;
  std::string_view body = bytes.substr(0, size);
  if (sum_of(body) != sum) return std::nullopt;
  RecordedCall call;
  call.arrival_ns = take<std::uint64_t>(body);
  call.method = static_cast<RecordedMethod>(take<std::uint8_t>(body));
  call.protocol = static_cast<RecordedProtocol>(take<std::uint8_t>(body));
  const std::size_t model = take<std::uint16_t>(body);
  const std::size_t version = take<std::uint16_t>(body);
  const std::size_t request_id = take<std::uint16_t>(body);
  const bool known_method =
      call.method == RecordedMethod::kPredict || call.method == RecordedMethod::kModelInfer;
  if (!known_method || model + version + request_id > body.size()) return std::nullopt;
  call.model = take_text(body, model);
  call.version = take_text(body, version);
  call.request_id = take_text(body, request_id);
  call.message = body;
  rest.remove_prefix(kPrefixBytes + size);
  return call;
}

}  // namespace tessera
