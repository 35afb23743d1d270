// Whole numbers in text that others have written.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace tessera {

// The number that `digits` write; nothing where they are not digits alone, or too many for a long.
inline std::optional<long> whole_number(std::string_view digits) {
  long number = 0;
  const char* const end = digits.data() + digits.size();
  const auto parsed = std::from_chars(digits.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end || number < 0) return std::nullopt;
  return number;
}

}  // namespace tessera
