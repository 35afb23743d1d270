// Work that must not take a CPU from who serves.
//
// A priority alone divides the CPUs' time; who waits for a CPU that such work has is told by its
// slice as well. Linux' scheduler (EEVDF, from 6.12 on with a slice for each thread) lets a thread
// that becomes ready take the CPU of one with a longer slice at once, and otherwise not before
// that one's slice has ended, which is seen at a tick, up to 4 ms later. So such work asks for the
// longest slice that there is. Linux' Documentation/scheduler/sched-eevdf.rst describes it.
//
// Contract: free functions; any thread. Linux gives threads a priority and a slice of their own.
#pragma once

#include <functional>

namespace tessera {

// The nice level of work beside answering: behind that of inference, and high enough for some
// progress on a machine whose CPUs are all in use.
inline constexpr int kAsideNiceness = 10;

// Gives the calling thread kAsideNiceness, unless it has a lower priority already, and the longest
// slice; threads and processes that it starts have them, too. Where that is refused the thread runs
// as it is; a kernel without slices of threads changes nothing else.
void stand_aside();

// Does `work` on a thread that stands aside, and waits for it; where the system gives no thread, on
// the calling one. Whatever is to serve must be started elsewhere. Throws what `work` throws.
void stand_aside(const std::function<void()>& work);

}  // namespace tessera
