// Keeps freed memory for the next pass, and gives it back after a burst. glibc by itself may do the
// opposite: a pass over long bags frees some megabytes more than the few hundred kB that it keeps
// at the end of an arena, so that each pass had thousands of page faults; and what thousands of
// calls at once have freed, many times what an even load needs, stays.
//
// Contract: keep_freed_memory is called before there are threads. tick is called by one thread,
// every few seconds at most; it may block for milliseconds, and threads that allocate at that
// moment wait for it. HeapTrim is a plain value.
#pragma once

#include <cstdint>

namespace tessera {

// Of each arena up to 32 MiB, and no block below 32 MiB is mapped for itself: what glibc's own
// thresholds grow to where a block of that size was once freed. Settings of malloc in the
// environment stand.
void keep_freed_memory();

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
