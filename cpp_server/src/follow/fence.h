// log/fenced.json: the commits that were rolled back, which nobody may take again. It grows only:
// who adds to it holds the lock of log/.fenced.lock from before it is read until the new file is in
// its place, so that of several who add none loses another's entries.
//
// Contract: free functions without state; any thread; they block on the file system. Throw
// UsageError, whose text is one line that names the file.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "follow/commit_chain.h"

namespace tessera {

inline constexpr std::size_t kMaxFenceBytes = std::size_t{4} << 20;

// Reads `json`, the content of `file` (which messages name).
Fence parse_fence(std::string_view json, const std::string& file);

// The fence of the log in the folder `log`; empty where there is none.
Fence read_fence(const std::string& log);

// Fences off `more` as well; gives all that are fenced. Waits for others who add, for 10 s at most.
Fence write_fence(const std::string& log, const Fence& more);

}  // namespace tessera
