// The flags that say what is told of each call; docs/observe.md.
//
// Contract: a free function without state; the flags refer to `config`, which outlives them.
#pragma once

#include <vector>

#include "common/flags.h"
#include "server/config.h"

namespace tessera {

std::vector<Flag> observe_flags(ServerConfig& config);

}  // namespace tessera
