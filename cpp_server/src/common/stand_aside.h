// Work that must not take a CPU from who serves.
//
// Contract: free functions; any thread. Linux gives threads a priority of their own.
#pragma once

#include <functional>

namespace tessera {

// The nice level of work beside answering: behind that of inference, and high enough for some
// progress on a machine whose CPUs are all in use.
inline constexpr int kAsideNiceness = 10;

// Gives the calling thread kAsideNiceness, unless it has a lower priority already; threads and
// processes that it starts have it, too. Where that is refused the thread runs as it is.
void stand_aside();

// Does `work` on a thread that stands aside, and waits for it; where the system gives no thread, on
// the calling one. Whatever is to serve must be started elsewhere. Throws what `work` throws.
void stand_aside(const std::function<void()>& work);

}  // namespace tessera
