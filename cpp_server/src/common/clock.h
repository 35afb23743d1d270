// Time as the server sees it: monotonic, and injected wherever a decision depends on it, so
// that tests decide what time it is and never sleep.
//
// Contract: Clock::now may be called from any thread and does not block.
#pragma once

#include <time.h>

#include <chrono>

namespace tessera {

using Duration = std::chrono::nanoseconds;
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Duration>;

inline constexpr TimePoint kNever = TimePoint::max();

// `whole` and `rest` (which is less than a second) after `now`; kNever where a TimePoint, which
// ends after 292 years, does not reach.
inline TimePoint later(TimePoint now, std::chrono::seconds whole, Duration rest) {
  const auto reach = std::chrono::floor<std::chrono::seconds>(kNever - now);
  return whole < reach ? now + whole + rest : kNever;
}

inline double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

// What the calling thread has used of CPUs: unlike time, it does not pass while others have them.
inline Duration thread_cpu_time() {
  timespec used{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
}

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  TimePoint now() const override { return std::chrono::steady_clock::now(); }
};

}  // namespace tessera
