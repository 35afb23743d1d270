#include "server/shared_memory_flags.h"

#include <cstdint>
#include <string>

namespace tessera {

std::vector<Flag> shared_memory_flags(ServerConfig& config) {
  return {
      {"shared-memory", "",
       "let clients of this machine register POSIX shared memory, read inputs from it and write "
       "outputs to it; whoever may call may name any of it that this server's user may open, "
       "docs/security.md (default: tensors come in messages alone)",
       [&](const std::string&) { config.shared_memory = true; }},
      number_flag("max-shared-memory-bytes",
                  "what the regions that --shared-memory lets clients register may have in sum, "
                  "bytes",
                  config.max_shared_memory_bytes, 1, std::int64_t{1} << 50),
  };
}

std::unique_ptr<SharedMemory> make_shared_memory(const ServerConfig& config) {
  if (!config.shared_memory) return nullptr;
  SharedMemory::Limits limits;
  limits.descriptors = SharedMemory::descriptors_to_be_had(limits.descriptors);
  limits.bytes = static_cast<std::uint64_t>(config.max_shared_memory_bytes);
  limits.request_bytes = static_cast<std::uint64_t>(config.max_message_bytes);
  return std::make_unique<SharedMemory>(limits);
}

}  // namespace tessera
