// What the main thread waits for: signals, and a flag that other threads raise; and what a signal
// means.
//
// Contract: one thread waits; raise may be called from any thread (not from a signal
// handler). The signals must be blocked in every thread before the first thread is started,
// which block_signals does when main calls it first.
#pragma once

#include <optional>

#include "common/clock.h"

namespace tessera {

// Blocks SIGTERM, SIGINT and SIGHUP in the calling thread and those it starts, and ignores SIGPIPE.
void block_signals();

enum class SignalMeaning {
  kDrain,   // the first SIGTERM or SIGINT
  kRepeat,  // another one within a second of the first: supervisors send to a process and its group
  kEnd,     // a later one
  kReload,  // SIGHUP
};

// Tells what each signal means from those that came before it. Plain state, for one thread.
class SignalReader {
 public:
  SignalMeaning read(int number, TimePoint now);

 private:
  std::optional<TimePoint> first_stop_;
};

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
