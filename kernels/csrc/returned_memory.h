// Memory that the system has back as soon as it is given back, where it is large.
//
// The C library keeps what a thread has freed for that thread's next allocations as long as
// something behind it is in use. What each of many threads takes for a while, and others give back,
// adds up: commits of 9 MB of which 20 were kept held 310 MiB.
//
// Contract: free functions, any thread.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace tessera {

// From here on a piece has a mapping of its own. Up to a page is lost to each, of 16 or more.
inline constexpr std::size_t kMappedBytes = std::size_t{64} << 10;

// Not set to zero. Throws std::bad_alloc.
inline void* take_memory(std::size_t bytes) {
  if (bytes < kMappedBytes) return ::operator new(bytes);
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

// What take_memory gave for as many `bytes`.
inline void give_memory_back(void* memory, std::size_t bytes) noexcept {
  if (bytes < kMappedBytes) {
    ::operator delete(memory);
  } else {
    ::munmap(memory, bytes);
  }
}

}  // namespace tessera
