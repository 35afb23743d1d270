#include "package/field_rules.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/text.h"
#include "package/format_rules.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

[[noreturn]] void refuse(const std::string& where, const std::string& why) {
  throw std::invalid_argument(text(where, ": ", why));
}

std::string_view name_of(const Json& value) {
  if (value.is_number_integer()) return "an integer";
  if (value.is_number()) return "a number";
  if (value.is_string()) return "a text";
  if (value.is_boolean()) return "true or false";
  if (value.is_array()) return "a list";
  return value.is_object() ? "an object" : "null";
}

void expect(bool is_one, std::string_view what, const Json& value, const std::string& where) {
  if (!is_one) refuse(where, text("expected ", what, ", found ", name_of(value)));
}

unsigned char byte_at(std::string_view content, std::size_t at) {
  return at < content.size() ? static_cast<unsigned char>(content[at]) : 0;
}

// Control characters, and what breaks lines; `content` is valid UTF-8.
bool is_printable(std::string_view content) {
  for (std::size_t i = 0; i < content.size(); ++i) {
    const unsigned char first = byte_at(content, i);
    const unsigned char second = byte_at(content, i + 1);
    const unsigned char third = byte_at(content, i + 2);
    if (first < 0x20 || first == 0x7f) return false;
    if (first == 0xc2 && second < 0xa0) return false;  // U+0080 to U+009F
    if (first == 0xe2 && second == 0x80 && (third == 0xa8 || third == 0xa9)) return false;
  }
  return true;
}

std::string quoted(const std::string& name) {
  return is_printable(name) ? "'" + name + "'" : "'?'";
}

void check_text(const std::string& content, const std::string& where) {
  if (!is_printable(content)) refuse(where, "has a letter that cannot be printed");
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_hex(std::string_view content, std::size_t digits) {
  return content.size() == digits && std::all_of(content.begin(), content.end(), [](char c) {
           return is_digit(c) || (c >= 'a' && c <= 'f');
         });
}

// Two numbers of one to four digits with a point between them.
bool is_release(std::string_view content) {
  const auto point = content.find('.');
  if (point == std::string_view::npos) return false;
  for (const std::string_view part : {content.substr(0, point), content.substr(point + 1)}) {
    if (part.empty() || part.size() > 4 || !std::all_of(part.begin(), part.end(), is_digit)) {
      return false;
    }
  }
  return true;
}

void check_integer(const Json& value, const Json& bounds, const std::string& where) {
  expect(value.is_number_integer(), "an integer", value, where);
  // The bounds are numbers of 63 bits and a sign; nlohmann reads what is not negative as unsigned.
  const bool is_huge = value.is_number_unsigned() &&
                       value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max();
  const auto number = is_huge ? 0 : value.get<std::int64_t>();
  if (is_huge || number < bounds.at(0).get<std::int64_t>() ||
      number > bounds.at(1).get<std::int64_t>()) {
    refuse(where, text("is out of its range, ", bounds.at(0).dump(), " to ", bounds.at(1).dump()));
  }
}

void check_number(const Json& value, const Json& bounds, const std::string& where) {
  expect(value.is_number(), "a number", value, where);
  const auto number = value.get<double>();
  if (!(number >= bounds.at(0).get<double>() && number <= bounds.at(1).get<double>())) {
    refuse(where, text("is out of its range, ", bounds.at(0).dump(), " to ", bounds.at(1).dump()));
  }
}

void check(const Json& value, const Json& rule, const std::string& where);

void check_object(const Json& value, const Json& fields, const std::string& where) {
  expect(value.is_object(), "an object", value, where);
  for (const auto& field : fields.items()) {
    if (!value.contains(field.key())) refuse(where, "missing key '" + field.key() + "'");
  }
  for (const auto& item : value.items()) {
    const auto field = fields.find(item.key());
    if (field == fields.end()) refuse(where, "unknown key " + quoted(item.key()));
    check(item.value(), *field, where + "." + item.key());
  }
}

void check_one_of(const Json& value, const Json& words, const std::string& where) {
  if (std::find(words.begin(), words.end(), value) != words.end()) return;
  std::string listed;
  for (const Json& word : words) listed += (listed.empty() ? "" : ", ") + word.get<std::string>();
  refuse(where, "expected one of " + listed);
}

void check_word(const Json& value, std::string_view word, const std::string& where) {
  if (word == "flag") return expect(value.is_boolean(), "true or false", value, where);
  expect(value.is_string(), "a text", value, where);
  const auto& content = value.get_ref<const std::string&>();
  if (word == "text") {
    check_text(content, where);
  } else if (!is_release(content)) {
    refuse(where, "expected a release such as 2.13");
  }
}

// `rule` is a word, or an object of one kind with what it needs.
void check(const Json& value, const Json& rule, const std::string& where) {
  if (rule.is_string()) return check_word(value, rule.get_ref<const std::string&>(), where);
  const auto entry = rule.begin();
  const std::string& kind = entry.key();
  const Json& detail = entry.value();
  if (kind == "object") {
    check_object(value, detail, where);
  } else if (kind == "or_null") {
    if (!value.is_null()) check(value, detail, where);
  } else if (kind == "one_of") {
    check_one_of(value, detail, where);
  } else if (kind == "integer") {
    check_integer(value, detail, where);
  } else if (kind == "number") {
    check_number(value, detail, where);
  } else if (kind == "hex") {
    expect(value.is_string(), "a text", value, where);
    if (!is_hex(value.get_ref<const std::string&>(), detail.get<std::size_t>())) {
      refuse(where, text("expected ", detail.dump(), " lower-case hex digits"));
    }
  } else if (kind == "list") {
    expect(value.is_array(), "a list", value, where);
    for (std::size_t i = 0; i < value.size(); ++i) {
      check(value[i], detail, text(where, "[", i, "]"));
    }
  } else if (kind == "map") {
    expect(value.is_object(), "an object", value, where);
    for (const auto& item : value.items()) {
      check_text(item.key(), where + ", a key");
      check(item.value(), detail, where + "." + item.key());
    }
  } else {
    throw std::logic_error("format_rules.h has a rule of an unknown kind");
  }
}

}  // namespace

void check_manifest_fields(const Json& manifest, int version) {
  const auto place = static_cast<std::size_t>(version - kOldestFormatVersion);
  check(manifest, Json::parse(kManifestRules.at(place)), "manifest");
}

void check_commit_fields(const Json& commit) { check(commit, Json::parse(kCommitRules), "commit"); }

}  // namespace tessera
