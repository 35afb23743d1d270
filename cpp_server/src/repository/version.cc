#include "repository/version.h"

#include <algorithm>
#include <charconv>

#include "common/text.h"

namespace tessera {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_of_label(char c) { return is_letter(c) || is_digit(c) || c == '_' || c == '-'; }

}  // namespace

std::optional<Version> parse_version(std::string_view name) {
  if (name.empty() || !is_digit(name.front()) || name.front() == '0') return std::nullopt;
  Version version = 0;
  const char* const end = name.data() + name.size();
  const auto [stopped, error] = std::from_chars(name.data(), end, version);
  if (error != std::errc() || stopped != end) return std::nullopt;
  return version;
}

bool is_label(std::string_view name) {
  return !name.empty() && name.size() <= kMaxLabelBytes && is_letter(name.front()) &&
         std::all_of(name.begin(), name.end(), is_of_label);
}

std::string label_rule() {
  return text("a letter, then letters, digits, '_' or '-', at most ", kMaxLabelBytes, " of them");
}

bool is_model_name(std::string_view name) {
  return !name.empty() && name.size() <= kMaxModelNameBytes && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), [](char c) { return is_of_label(c) || c == '.'; });
}

}  // namespace tessera
