// The flags that say what is told of each call; docs/observe.md.
//
// Contract: free functions without state; the flags refer to `config`, which outlives them.
// check_observing throws FlagError.
#pragma once

#include <vector>

#include "common/flags.h"
#include "server/config.h"

namespace tessera {

std::vector<Flag> observe_flags(ServerConfig& config);

// Refuses what is said of a collector that is not there.
void check_observing(const ServerConfig& config);

}  // namespace tessera
