// Counters that many threads change, spread so that threads seldom share a cache line.
//
// Contract: any thread; nothing blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tessera {

inline constexpr std::size_t kThreadSlots = 64;  // more than threads that count often

// One of kThreadSlots counters.
struct alignas(64) ThreadSlot {
  std::atomic<std::uint32_t> count = 0;
};

// Which of the slots the calling thread uses: always the same one.
inline std::size_t slot_of_thread() {
  static std::atomic<std::size_t> threads = 0;
  thread_local const std::size_t slot = threads.fetch_add(1) % kThreadSlots;
  return slot;
}

}  // namespace tessera
