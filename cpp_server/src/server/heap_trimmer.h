// Gives memory back after a burst. glibc keeps what was freed, arena by arena, for the next
// request; after thousands of calls at once that is many times what an even load needs.
//
// Contract: tick is called by one thread, every few seconds at most; it may block for
// milliseconds, and threads that allocate at that moment wait for it. HeapTrim is a plain value.
#pragma once

#include <cstdint>

namespace tessera {

// When to trim: once free memory has stayed kSurplusBytes above its lowest for kPatience looks.
// An even load never gets there, and a load that comes in waves needs the memory again.
class HeapTrim {
 public:
  static constexpr std::int64_t kSurplusBytes = 16 * 1024 * 1024;
  static constexpr int kPatience = 3;

  // `free_bytes`: what the allocator holds unused, given back or not.
  bool worth(std::int64_t free_bytes);

 private:
  std::int64_t lowest_ = 0;
  bool seen_ = false;
  int looks_ = 0;
};

class HeapTrimmer {
 public:
  // Called about once a second; looks at the heap at every kSecondsBetween-th call. The bytes
  // that were unused when it trimmed, else zero.
  std::int64_t tick();

 private:
  static constexpr int kSecondsBetween = 5;
  HeapTrim trim_;
  int ticks_ = 0;
};

}  // namespace tessera
