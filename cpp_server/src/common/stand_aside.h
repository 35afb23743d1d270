// Work that must not take a CPU from who serves.
//
// Contract: a free function; any thread.
#pragma once

#include <functional>

namespace tessera {

inline constexpr int kLowestNiceness = 19;

// Does `work` on a thread of the niceness `niceness`, by default one that waits behind all others
// for a CPU, and waits for it. Linux gives threads a priority of their own; those that this one
// starts have it, too. So whatever is to serve must be started elsewhere. Throws what `work`
// throws.
void stand_aside(const std::function<void()>& work, int niceness = kLowestNiceness);

}  // namespace tessera
