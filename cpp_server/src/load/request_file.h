// Requests that a program has written to a file: each after its size as 4 bytes, little-endian.
#pragma once

#include <string>
#include <vector>

namespace tessera {

// All of them. Throws UsageError where the file cannot be read, is cut short or has none.
std::vector<std::string> read_request_file(const std::string& path);

}  // namespace tessera
