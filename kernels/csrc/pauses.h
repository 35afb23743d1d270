// How long work beside answering pauses, so that it uses no more than a share of one CPU.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

namespace tessera {

// Work that has used so much of a CPU, and waited for one for half as long, pauses.
inline constexpr std::chrono::nanoseconds kPiece = std::chrono::microseconds(100);
inline constexpr std::chrono::nanoseconds kLeastPause = std::chrono::microseconds(100);
// A piece that took longer than it should is not paid for by seconds of silence.
inline constexpr std::chrono::nanoseconds kMostPause = std::chrono::milliseconds(50);

// How long the pause behind `used` of a CPU, within `passed` since the last pause, should be for
// work that may use `share` of a CPU; zero: not yet. Work that has waited for a CPU pauses behind
// each piece all the same, as Linux brings threads that wait behind each other on one CPU to
// another one when that one has nothing left to run: while such work waits there, it always has.
inline std::chrono::nanoseconds pause_behind(std::chrono::nanoseconds used,
                                             std::chrono::nanoseconds passed, double share) {
  const auto whole = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(used) / share);
  const std::chrono::nanoseconds pause = std::min(whole - passed, kMostPause);
  if (pause >= kLeastPause) return pause;
  const bool waited = used >= kPiece && passed - used >= kPiece / 2;
  return waited ? kLeastPause : std::chrono::nanoseconds::zero();
}

// What a clock of the system has counted.
inline std::chrono::nanoseconds time_of(clockid_t clock) {
  timespec counted{};
  ::clock_gettime(clock, &counted);
  return std::chrono::seconds(counted.tv_sec) + std::chrono::nanoseconds(counted.tv_nsec);
}

// The pauses of one call of an operator, on its thread. The Pace of tessera-server also looks
// whether anybody is answered at all.
class Pauses {
 public:
  // `share` of a CPU. After `seconds` it does not pause any more; by default it always does.
  explicit Pauses(double share, double seconds = std::numeric_limits<double>::infinity())
      : share_(share), until_(now() + std::chrono::duration<double>(seconds)) {
    begin();
  }

  // To be called between pieces of some 100 microseconds.
  void rest() {
    // Another thread, which has used other time, goes on with the work.
    if (thread_ != std::this_thread::get_id()) begin();
    const auto at = now();
    if (at >= until_) return;
    const std::chrono::nanoseconds used = time_of(CLOCK_THREAD_CPUTIME_ID) - used_;
    const std::chrono::nanoseconds pause = pause_behind(used, at - last_, share_);
    // Time that has passed without a CPU does not count later.
    if (pause == std::chrono::nanoseconds::zero() && at - last_ < used + kMostPause) return;
    if (pause > std::chrono::nanoseconds::zero()) std::this_thread::sleep_for(pause);
    begin();
  }

 private:
  using Clock = std::chrono::steady_clock;

  static std::chrono::time_point<Clock, std::chrono::nanoseconds> now() { return Clock::now(); }

  void begin() {
    thread_ = std::this_thread::get_id();
    last_ = now();
    used_ = time_of(CLOCK_THREAD_CPUTIME_ID);
  }

  const double share_;
  const std::chrono::time_point<Clock, std::chrono::duration<double>> until_;
  std::thread::id thread_;
  std::chrono::time_point<Clock, std::chrono::nanoseconds> last_;
  std::chrono::nanoseconds used_{};
};

}  // namespace tessera
