// The flags that say who may call; docs/security.md.
//
// Contract: a free function without state; the flags refer to `config`, which outlives them.
#pragma once

#include <vector>

#include "common/flags.h"
#include "front/host_rule.h"
#include "server/config.h"

namespace tessera {

std::vector<Flag> security_flags(ServerConfig& config);

// By which names browsers may ask the HTTP port.
HostRule host_rule(const ServerConfig& config);

// Throws UsageError where of flags that belong together some are missing.
void check_security(const ServerConfig& config);

}  // namespace tessera
