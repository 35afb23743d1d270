// Work that runs only while a CPU has nothing else to do, as long as that happens often enough.
//
// A thread of the class SCHED_IDLE gives its CPU to whoever wakes up there at once, and where the
// kernel looks for a CPU for a thread that wakes up, one that runs only such threads counts as
// free. A thread of the lowest priority has neither: it keeps its CPU until a scheduler's tick, and
// those that wake up meanwhile are put behind each other on the others (docs/benchmarks.md has what
// calls wait then). But a thread of the class has a three-hundredth of a CPU that others want all
// the time, a few milliseconds once in a second, and without privileges it cannot go back to
// another class: whoever waits for it was seen to wait for 77 seconds, as long as all CPUs were
// busy. So such work is begun only while they are not, it must be of the kind that another thread
// can begin, or go on with, and where the process has the privilege (CAP_SYS_NICE) a thread that is
// to stop goes back to the class of others.
//
// Contract: Starvation: one object per thread. The functions: any thread; run_when_idle blocks.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <sys/types.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <sstream>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

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

// Takes that class from a thread of this process, which keeps its priority; false: it is refused.
inline bool lift(pthread_t thread) {
  const sched_param none{};
  return ::pthread_setschedparam(thread, SCHED_OTHER, &none) == 0;
}

// Whether the calling thread has it.
inline bool is_idle() { return ::sched_getscheduler(0) == SCHED_IDLE; }

// How much of the CPUs that this process may use nobody used lately (proc_stat(5)).
class IdleTime {
 public:
  // The share since the call before, of [0, 1]; 1 where it is not known. Where that call was too
  // long ago, this one takes 100 ms; where it was less than that ago, the answer is the same. To be
  // called by one thread at a time.
  double share() {
    constexpr std::chrono::milliseconds kLeast{100};
    constexpr std::chrono::seconds kMost{5};
    const auto passed = std::chrono::steady_clock::now() - at_;
    if (passed < kLeast) return share_;
    if (passed > kMost) {  // so it is at first: the clock begins when the machine does
      look();
      std::this_thread::sleep_for(kLeast);
    }
    look();
    return share_;
  }

 private:
  struct Times {
    std::int64_t idle = 0;
    std::int64_t all = 0;
  };

  static Times read() {
    cpu_set_t mine;
    const bool known = ::sched_getaffinity(0, sizeof mine, &mine) == 0;
    Times sum;
    std::ifstream file("/proc/stat");
    std::string line;
    while (std::getline(file, line) && line.starts_with("cpu")) {
      std::istringstream fields(line.substr(3));
      unsigned cpu = 0;
      if (line[3] == ' ' || !(fields >> cpu)) continue;  // the sum of all
      if (known && (cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &mine))) continue;
      std::int64_t time = 0;
      // user, nice, system, idle, iowait, irq, softirq, steal; what guests use is in user.
      for (int field = 0; field < 8 && fields >> time; ++field) {
        sum.all += time;
        if (field == 3 || field == 4) sum.idle += time;
      }
    }
    return sum;
  }

  void look() {
    const Times times = read();
    const auto all = static_cast<double>(times.all - times_.all);
    share_ = all > 0 ? static_cast<double>(times.idle - times_.idle) / all : 1;
    times_ = times;
    at_ = std::chrono::steady_clock::now();
  }

  double share_ = 1;
  std::chrono::steady_clock::time_point at_;
  Times times_;
};

// Whether a thread of the class will get on: CPUs had nothing to do for a part of the time lately.
// Any thread.
inline bool idle_thread_gets_on() {
  constexpr double kLeast = 0.05;
  static std::mutex mutex;
  static IdleTime idle;
  const std::lock_guard lock(mutex);
  return idle.share() >= kLeast;
}

// Calls `work` on a thread of the class and waits for it. Where it has too little of a CPU before
// it has begun, `work` is called on the calling thread, with a `stop` that never is, and the other
// thread ends without it once it has a CPU. Where it has begun, `stop` is asked for, and once it
// has returned `work` is called again in that way, to do what is left, if anything is. So it is
// where the system gives no such thread. Throws what `work` throws.
inline void run_on_idle_thread(const std::function<void(const std::stop_token& stop)>& work,
                               Patience patience = {}) {
  struct Shared {  // outlives this call where the thread has not ended
    std::atomic<bool> begun = false;
    std::promise<bool> end;      // whether the thread has done the work
    std::exception_ptr failure;  // what it threw, before that; the caller takes it away
    std::stop_source stop;
  };
  const auto shared = std::make_shared<Shared>();
  std::thread thread;
  try {
    thread = std::thread([shared, &work] {
      static_cast<void>(::pthread_setname_np(::pthread_self(), "idle"));
      const bool mine = be_idle() && !shared->begun.exchange(true);
      try {
        if (mine) work(shared->stop.get_token());
      } catch (...) {
        shared->failure = std::current_exception();
      }
      shared->end.set_value(mine);  // this thread has let go of the exception, too
    });
  } catch (const std::system_error&) {
    return work(std::stop_token());
  }
  std::future<bool> end = shared->end.get_future();
  clockid_t cpu = CLOCK_THREAD_CPUTIME_ID;
  ::pthread_getcpuclockid(thread.native_handle(), &cpu);
  Starvation starvation(cpu, patience);
  bool starved = false;
  while (!starved && end.wait_for(patience.length) == std::future_status::timeout) {
    starved = starvation.seen();
  }
  const bool taken = starved && !shared->begun.exchange(true);
  if (starved) {
    shared->stop.request_stop();
    lift(thread.native_handle());
  }
  thread.detach();  // it may need a CPU once more to end, and nobody waits for that
  if (taken) return work(std::stop_token());
  const bool done = end.get();
  if (shared->failure != nullptr) std::rethrow_exception(std::exchange(shared->failure, nullptr));
  if (!done || starved) work(std::stop_token());
}

// The same, where such a thread gets on; elsewhere the calling thread does the work.
inline void run_when_idle(const std::function<void(const std::stop_token& stop)>& work,
                          Patience patience = {}) {
  if (!idle_thread_gets_on()) return work(std::stop_token());
  run_on_idle_thread(work, patience);
}

}  // namespace tessera
