// What the main thread waits for: signals, and a flag that other threads raise.
//
// Contract: one thread waits; raise may be called from any thread (not from a signal
// handler). The signals must be blocked in every thread before the first thread is started,
// which block_signals does when main calls it first.
#pragma once

#include <optional>

#include "common/clock.h"

namespace tessera {

// Blocks SIGTERM and SIGINT in the calling thread and those it starts, and ignores SIGPIPE.
void block_signals();

class Events {
 public:
  Events();
  ~Events();
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  // Wakes the waiting thread, now or when it next waits.
  void raise();

  // Waits for a signal, a raise, or `until`. Returns the signal's number if there was one.
  std::optional<int> wait(TimePoint until);

 private:
  int signals_ = -1;
  int raised_ = -1;
};

}  // namespace tessera
