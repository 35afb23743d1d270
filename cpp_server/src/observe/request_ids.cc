#include "observe/request_ids.h"

#include <algorithm>
#include <cstdint>
#include <random>

namespace tessera {
namespace {

constexpr std::string_view kDigits = "0123456789abcdef";
constexpr std::size_t kTraceIdAt = 3;
constexpr std::size_t kTraceIdDigits = 32;
constexpr std::size_t kSpanIdAt = kTraceIdAt + kTraceIdDigits + 1;
constexpr std::size_t kSpanIdDigits = 16;
constexpr std::size_t kFlagsAt = kSpanIdAt + kSpanIdDigits + 1;
constexpr std::size_t kParentBytes = kFlagsAt + 2;

bool is_printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

bool is_hexadecimal(std::string_view text) {
  return text.find_first_not_of(kDigits) == std::string_view::npos;
}

bool is_zero(std::string_view text) {
  return text.find_first_not_of('0') == std::string_view::npos;
}

}  // namespace

void choose_request_id(std::string_view given, std::string& id) {
  given = given.substr(0, kMostRequestIdBytes);
  if (!given.empty() && is_printable(given)) {
    id = given;
    return;
  }
  id.clear();
  append_random_digits(id);
  append_random_digits(id);
}

std::uint64_t random_bits() {
  static thread_local std::mt19937_64 random{[] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }()};
  return random();
}

double random_share() {
  constexpr unsigned kFractionBits = 53;
  constexpr unsigned kWordBits = 64;
  return static_cast<double>(random_bits() >> (kWordBits - kFractionBits)) /
         static_cast<double>(std::uint64_t{1} << kFractionBits);
}

void append_random_digits(std::string& id) {
  constexpr unsigned kWordDigits = 16;
  constexpr unsigned kDigitBits = 4;
  std::uint64_t bits = random_bits();
  for (unsigned i = 0; i < kWordDigits; ++i, bits >>= kDigitBits) id += kDigits[bits & 0xfU];
}

std::optional<TraceParent> read_traceparent(std::string_view header) {
  if (header.size() < kParentBytes) return std::nullopt;
  const std::string_view version = header.substr(0, 2);
  // A later version may say more behind what this one has.
  const bool ends =
      header.size() == kParentBytes || (version != "00" && header[kParentBytes] == '-');
  const bool dashes =
      header[kTraceIdAt - 1] == '-' && header[kSpanIdAt - 1] == '-' && header[kFlagsAt - 1] == '-';
  const TraceParent parent{.trace_id = header.substr(kTraceIdAt, kTraceIdDigits),
                           .span_id = header.substr(kSpanIdAt, kSpanIdDigits)};
  const std::string_view flags = header.substr(kFlagsAt, 2);
  if (!ends || !dashes || version == "ff" || is_zero(parent.trace_id) || is_zero(parent.span_id)) {
    return std::nullopt;
  }
  for (const std::string_view part : {version, parent.trace_id, parent.span_id, flags}) {
    if (!is_hexadecimal(part)) return std::nullopt;
  }
  return TraceParent{parent.trace_id, parent.span_id, (kDigits.find(flags[1]) & 1U) != 0};
}

}  // namespace tessera
