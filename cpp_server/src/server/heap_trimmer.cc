#include "server/heap_trimmer.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>

namespace tessera {

void keep_freed_memory() {
  for (const char* const name :
       {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}) {
    if (std::getenv(name) != nullptr) return;
  }
  constexpr int kKept = 32 * 1024 * 1024;
  ::mallopt(M_MMAP_THRESHOLD, kKept);
  ::mallopt(M_TRIM_THRESHOLD, kKept);
}

bool HeapTrim::worth(std::int64_t free_bytes) {
  lowest_ = seen_ ? std::min(lowest_, free_bytes) : free_bytes;
  seen_ = true;
  looks_ = free_bytes - lowest_ >= kSurplusBytes ? looks_ + 1 : 0;
  if (looks_ < kPatience) return false;
  // What has been given back still counts as unused.
  lowest_ = free_bytes;
  looks_ = 0;
  return true;
}

std::int64_t HeapTrimmer::tick() {
  if (++ticks_ % kSecondsBetween != 0) return 0;
  const auto free_bytes = static_cast<std::int64_t>(::mallinfo2().fordblks);
  if (!trim_.worth(free_bytes)) return 0;
  ::malloc_trim(0);
  return free_bytes;
}

}  // namespace tessera
