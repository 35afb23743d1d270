// JSON as every reader of it understands it: no key twice in an object, no comments, and no more
// levels than whoever reads it expects.
//
// Contract: free functions without state; any thread. For source files alone that see nlohmann's
// header.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera {

// What is wrong with a text that is not such JSON; what() is one line that fits behind the name of
// what was read and "is not JSON: ".
class JsonError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The value that `json` writes down, with at most `max_depth` objects and lists within each other.
// Throws JsonError.
nlohmann::json parse_strictly(std::string_view json, int max_depth);

}  // namespace tessera
