#include "observe/json_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

namespace tessera {

void append_json_text(std::string& json, std::string_view value) {
  const auto plain = [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; };
  if (std::all_of(value.begin(), value.end(), plain)) {
    json.append(1, '"').append(value).append(1, '"');
  } else {
    json += nlohmann::json(value).dump(-1, ' ', /*ensure_ascii=*/true,
                                       nlohmann::json::error_handler_t::replace);
  }
}

void append_number(std::string& json, std::int64_t number) {
  std::array<char, 24> digits{};
  const auto made = std::to_chars(digits.data(), digits.data() + digits.size(), number);
  json.append(digits.data(), made.ptr);
}

}  // namespace tessera
