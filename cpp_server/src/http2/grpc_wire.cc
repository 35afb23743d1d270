#include "http2/grpc_wire.h"

#include <algorithm>
#include <charconv>

namespace tessera::http2 {
namespace {

constexpr std::size_t kMaxMessage = 1'000;
constexpr std::size_t kMaxDigits = 8;

struct Unit {
  char letter;
  Duration length;
};
constexpr Unit kUnits[] = {{'H', std::chrono::hours(1)},        {'M', std::chrono::minutes(1)},
                           {'S', std::chrono::seconds(1)},      {'m', std::chrono::milliseconds(1)},
                           {'u', std::chrono::microseconds(1)}, {'n', Duration(1)}};

}  // namespace

std::optional<Encoding> encoding_of(std::string_view name) {
  const auto found = std::find(kEncodingNames.begin(), kEncodingNames.end(), name);
  if (found == kEncodingNames.end()) return std::nullopt;
  return static_cast<Encoding>(found - kEncodingNames.begin());
}

bool is_grpc_content(std::string_view content_type) {
  constexpr std::string_view kType = "application/grpc";
  if (!content_type.starts_with(kType)) return false;
  return content_type.size() == kType.size() || content_type[kType.size()] == '+' ||
         content_type[kType.size()] == ';';
}

std::optional<TimePoint> deadline_after(TimePoint now, std::string_view value) {
  if (value.size() < 2 || value.size() > kMaxDigits + 1) return std::nullopt;
  std::int64_t number = 0;
  const char* const end = value.data() + value.size() - 1;
  const auto parsed = std::from_chars(value.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end || number < 0) return std::nullopt;
  for (const Unit& unit : kUnits) {
    if (unit.letter != value.back()) continue;
    if (unit.length < std::chrono::seconds(1)) return later(now, {}, number * unit.length);
    return later(now, number * std::chrono::duration_cast<std::chrono::seconds>(unit.length), {});
  }
  return std::nullopt;
}

std::string percent_encoded(std::string_view message) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string encoded;
  for (const char c : message.substr(0, kMaxMessage)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte <= 0x7e && c != '%') {
      encoded += c;
    } else {
      encoded += {'%', kDigits[byte >> 4U], kDigits[byte & 0xfU]};
    }
  }
  return encoded;
}

}  // namespace tessera::http2
