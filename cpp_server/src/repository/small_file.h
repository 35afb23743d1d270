// Small files that are read and written as a whole.
//
// Contract: free functions without state; any thread; they block on the file system. Failures throw
// UsageError, whose text is one line that names the file.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

// The content of `path`, a regular file of at most `max_bytes`; nothing where there is none.
std::optional<std::string> read_small_file(const std::string& path, std::size_t max_bytes);

// Puts a file with `content` into the place of `path`: whoever opens it, even after the power has
// failed, finds the old content or the new one. Where that fails the old one is in its place.
void replace_file(const std::string& path, std::string_view content);

}  // namespace tessera
