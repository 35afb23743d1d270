#include "package/strict_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/text.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 500;  // what is deeper could not be printed on a thread's stack

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

}  // namespace

Json parse_ascii_json(std::span<const std::byte> json, std::string_view what,
                      std::int64_t max_marks) {
  const std::string_view all(reinterpret_cast<const char*>(json.data()), json.size());
  if (std::any_of(all.begin(), all.end(), [](char c) { return (c & 0x80) != 0; })) {
    refuse(text(what, " has a byte that is not ASCII"));
  }
  if (std::count_if(all.begin(), all.end(), [](char c) {
        return c == ',' || c == ':' || c == '[' || c == '{';
      }) > max_marks) {
    refuse(text(what, " has more than ", max_marks, " values"));
  }
  // The keys met so far of every object that is open.
  std::vector<std::set<std::string>> open;
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) refuse(text(what, " is nested more than ", kMaxDepth, " deep"));
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto key = value.get<std::string>();
      if (!open.back().insert(key).second) refuse("a key is there twice");
    }
    return true;
  };
  Json root = Json::parse(all.begin(), all.end(), check, /*allow_exceptions=*/false);
  if (root.is_discarded()) refuse(text(what, " is not JSON"));
  return root;
}

}  // namespace tessera
