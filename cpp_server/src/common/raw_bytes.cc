#include "common/raw_bytes.h"

#include "csrc/returned_memory.h"

namespace tessera {

void* take_raw_memory(std::size_t bytes) { return take_memory(bytes); }

void give_raw_memory_back(void* memory, std::size_t bytes) noexcept {
  give_memory_back(memory, bytes);
}

}  // namespace tessera
