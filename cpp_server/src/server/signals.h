// What a signal means, and where the main thread waits for one or for another thread to wake it.
//
// Contract: one thread waits; wake may be called from any thread (not from a signal
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

class SignalWaiter {
 public:
  SignalWaiter();
  ~SignalWaiter();
  SignalWaiter(const SignalWaiter&) = delete;
  SignalWaiter& operator=(const SignalWaiter&) = delete;

  // Wakes the waiting thread, now or when it waits next.
  void wake();

  // Waits for a signal, a wake, or `until`. Returns the signal's number if there was one.
  std::optional<int> wait(TimePoint until);

 private:
  int signals_ = -1;
  int woken_ = -1;
};

}  // namespace tessera
