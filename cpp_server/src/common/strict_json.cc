#include "common/strict_json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "common/text.h"

namespace tessera {

using Json = nlohmann::json;

Json parse_strictly(std::string_view json, int max_depth) {
  using Event = Json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, Event event, const Json& parsed) {
    if ((event == Event::object_start || event == Event::array_start) && depth >= max_depth) {
      throw JsonError(text("it is nested more than ", max_depth, " deep"));
    }
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw JsonError(text("a key is there twice: ",
                           parsed.dump(-1, ' ', true, Json::error_handler_t::replace)));
    }
    return true;
  };
  try {
    return Json::parse(json, watch);
  } catch (const Json::parse_error& error) {
    throw JsonError(text("at byte ", error.byte, " something else is expected"));
  } catch (const Json::out_of_range&) {
    throw JsonError("a number is larger than a double may be");
  }
}

}  // namespace tessera
