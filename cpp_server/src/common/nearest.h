// The known name that a user may have meant by one that is unknown.
//
// Contract: a pure function; any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// How many insertions, deletions, replacements and swaps of neighbouring characters make `b` of
// `a`: Levenshtein's distance with swaps, in which no character is changed twice.
std::size_t edits(std::string_view a, std::string_view b);

// Of `known` the one that the fewest edits make of `name`; empty where that takes more than a third
// of its characters.
std::string nearest(std::string_view name, const std::vector<std::string>& known);

}  // namespace tessera
