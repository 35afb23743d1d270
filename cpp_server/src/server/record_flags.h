// The flags that say which requests are recorded, and where; docs/replay.md.
//
// Contract: free functions without state; the flags refer to `config`, which outlives them.
// check_recording throws FlagError.
#pragma once

#include <vector>

#include "common/flags.h"
#include "server/config.h"

namespace tessera {

std::vector<Flag> record_flags(ServerConfig& config);

// Refuses bounds that contradict each other.
void check_recording(const ServerConfig& config);

}  // namespace tessera
