// Work that runs only while a CPU has nothing else to do, as long as that happens often enough.
//
// A thread of the class SCHED_IDLE gives its CPU to whoever wakes up there at once, and where the
// kernel looks for a CPU for a thread that wakes up, one that runs only such threads counts as
// free. A thread of the lowest priority has neither: it keeps its CPU until a scheduler's tick, and
// those that wake up meanwhile are put behind each other on the others (docs/benchmarks.md has what
// calls wait then). But a thread of the class has a three-hundredth of a CPU that others want all
// the time, and without privileges it cannot go back to another class. So such work must be of the
// kind that another thread can go on with.
//
// Contract: Starvation: one object per thread. The functions: any thread; run_when_idle blocks.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <sys/types.h>
#include <time.h>

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <stop_token>
#include <system_error>
#include <thread>

#include "pauses.h"

namespace tessera {

// How little of a CPU, and for how long, is too little.
struct Patience {
  double share = 0.01;
  std::chrono::nanoseconds length = std::chrono::seconds(2);
};

// Whether work has had too little of a CPU.
class Starvation {
 public:
  // `cpu` is the clock of what the work uses of CPUs; it is there as long as this is asked.
  explicit Starvation(clockid_t cpu, Patience patience = {})
      : cpu_(cpu), patience_(patience), begin_(Clock::now()), used_(time_of(cpu)) {}

  // Whether it has used less than the share over the last of the lengths that are whole; to be
  // called now and then.
  bool seen() {
    const auto at = Clock::now();
    const auto passed = at - begin_;
    if (passed < patience_.length) return false;
    const std::chrono::nanoseconds used = time_of(cpu_);
    const bool starved = used - used_ < passed * patience_.share;
    begin_ = at;
    used_ = used;
    return starved;
  }

 private:
  using Clock = std::chrono::steady_clock;

  const clockid_t cpu_;
  const Patience patience_;
  Clock::time_point begin_;
  std::chrono::nanoseconds used_;
};

// Gives the calling thread the class SCHED_IDLE; false: it is refused.
inline bool be_idle() {
  const sched_param none{};
  return ::sched_setscheduler(0, SCHED_IDLE, &none) == 0;
}

// Whether the calling thread has it.
inline bool is_idle() { return ::sched_getscheduler(0) == SCHED_IDLE; }

// Calls `work` on a thread of that class and waits for it. Where it has too little of a CPU, `stop`
// is asked for, and once it has returned `work` is called again, on the calling thread and with a
// `stop` that never is, to do what is left, if anything is. So it does where the system gives no
// such thread. Throws what `work` throws.
inline void run_when_idle(const std::function<void(const std::stop_token& stop)>& work,
                          Patience patience = {}) {
  std::promise<bool> promise;  // whether the work was begun
  std::future<bool> end = promise.get_future();
  std::jthread thread;
  try {
    thread = std::jthread([&](const std::stop_token& stop) {
      static_cast<void>(::pthread_setname_np(::pthread_self(), "idle"));
      try {
        const bool idle = be_idle();
        if (idle) work(stop);
        promise.set_value(idle);
      } catch (...) {
        promise.set_exception(std::current_exception());
      }
    });
  } catch (const std::system_error&) {
    promise.set_value(false);
  }
  bool starved = false;
  if (thread.joinable()) {
    clockid_t cpu = CLOCK_THREAD_CPUTIME_ID;
    ::pthread_getcpuclockid(thread.native_handle(), &cpu);
    Starvation starvation(cpu, patience);
    while (!starved && end.wait_for(patience.length) == std::future_status::timeout) {
      starved = starvation.seen();
    }
    if (starved) thread.request_stop();
  }
  if (!end.get() || starved) work(std::stop_token());
}

}  // namespace tessera
