// Short slices of a CPU for a thread that is to run as soon as it wakes up.
//
// Linux lets a thread that asks for a shorter slice than the running thread has interrupt it
// (sched_setattr(2), since 6.12); otherwise the running one often keeps the CPU until its own slice
// has ended, some milliseconds. What share of the CPU each of them has stays the same. Before 6.12
// the kernel takes no notice.
//
// Contract: free functions; any thread, for itself alone.
#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace tessera {

// The system's own structure in its first form, which every version takes. Its header cannot be
// included beside <sched.h>.
struct SchedulingAttributes {
  std::uint32_t size = sizeof(SchedulingAttributes);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime = 0;  // the slice, nanoseconds; 0: the kernel knows no slices of threads
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
};

inline constexpr std::uint64_t kShortSlice = 100'000;  // nanoseconds: the shortest that there is

// What the calling thread has; of no policy where it cannot be asked for.
inline SchedulingAttributes scheduling_attributes() {
  SchedulingAttributes found;
  if (::syscall(SYS_sched_getattr, 0, &found, sizeof(found), 0) != 0) found.policy = ~0U;
  return found;
}

// Asks for slices of kShortSlice. A thread of another class than the usual one keeps what it has.
inline void take_short_slices() {
  SchedulingAttributes own = scheduling_attributes();
  if (own.policy != SCHED_OTHER) return;
  own.size = sizeof(own);
  own.runtime = kShortSlice;
  // It needs no privilege; where a sandbox forbids it, the thread runs as it is.
  static_cast<void>(::syscall(SYS_sched_setattr, 0, &own, 0));
}

}  // namespace tessera
