// Pieces of JSON that are written by hand, since a call's line and its spans are made while its
// client waits.
//
// Contract: free functions without state; any thread. They may throw std::bad_alloc.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

// Appends `value` in quotes, as ASCII; bytes that are not UTF-8 are replaced.
void append_json_text(std::string& json, std::string_view value);

void append_number(std::string& json, std::int64_t number);

}  // namespace tessera
