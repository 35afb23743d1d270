// What somebody who mistyped a name probably meant.
//
// Contract: pure functions. Names are compared byte by byte; the time is the product of the
// lengths.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Of `names` the one with the fewest changes of a byte from `written` (a byte put in, left out,
// replaced, or exchanged with the next one: the optimal string alignment distance), the first of
// several; empty where more than a third of `written` and more than one byte would change.
std::string nearest_name(std::string_view written, const std::vector<std::string>& names);

// "; did you mean NAME?", or nothing.
std::string did_you_mean(std::string_view written, const std::vector<std::string>& names);

}  // namespace tessera
