// The flags that let clients register shared memory, and what they ask for; docs/kserve.md.
//
// Contract: free functions without state; the flags refer to `config`, which outlives them.
#pragma once

#include <memory>
#include <vector>

#include "common/flags.h"
#include "request/shared_memory.h"
#include "server/config.h"

namespace tessera {

std::vector<Flag> shared_memory_flags(ServerConfig& config);

// Null: clients may not register anything.
std::unique_ptr<SharedMemory> make_shared_memory(const ServerConfig& config);

}  // namespace tessera
