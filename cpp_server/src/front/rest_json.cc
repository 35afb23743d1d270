#include "front/rest_json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "common/text.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 8;

// Whether more than kMaxDepth brackets are open anywhere, outside of strings.
bool too_deep(std::string_view content) {
  int depth = 0;
  bool inside = false;  // of a string
  for (std::size_t at = 0; at < content.size(); ++at) {
    switch (content[at]) {
      case '\\':
        if (at + 1 < content.size() && (content[at + 1] == '\\' || content[at + 1] == '"')) ++at;
        break;
      case '"': inside = !inside; break;
      case '[':
      case '{':
        if (!inside && ++depth > kMaxDepth) return true;
        break;
      case ']':
      case '}':
        if (!inside) --depth;
        break;
      default: break;
    }
  }
  return false;
}

}  // namespace

Status read_rest_json(std::string_view content, Json& json) {
  if (content.size() > kMaxJsonBytes) {
    return Status::invalid(text("the JSON has ", content.size(), " bytes, the limit is ",
                                kMaxJsonBytes, "; send large tensors as binary data"));
  }
  if (too_deep(content)) {
    return Status::invalid(text("the JSON is nested more than ", kMaxDepth, " deep"));
  }
  using Event = Json::parse_event_t;
  bool twice = false;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int /*depth*/, Event event, const Json& parsed) {
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) twice = true;
    return true;
  };
  // A mark of the byte order and a zero, at which nlohmann's reader ends, are not of JSON.
  const bool readable = !content.starts_with("\xef\xbb\xbf") && content.find('\0') == content.npos;
  json = readable ? Json::parse(content, watch, /*allow_exceptions=*/false)
                  : Json(Json::value_t::discarded);
  if (json.is_discarded()) {
    return Status::invalid(text("the JSON (", content.size(),
                                " bytes) is not valid, or has a number that is larger than a "
                                "double may be"));
  }
  if (twice) return Status::invalid("the JSON has an object with the same key twice");
  return {};
}

}  // namespace tessera
