#include "common/idle_thread.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <exception>
#include <future>
#include <system_error>
#include <thread>

#include "common/thread_name.h"

namespace tessera {
namespace {

TimePoint now() { return std::chrono::steady_clock::now(); }

}  // namespace

Starvation::Starvation(clockid_t cpu, Patience patience)
    : cpu_(cpu), patience_(patience), begin_(now()), used_(time_of(cpu)) {}

bool Starvation::seen() {
  const TimePoint at = now();
  const Duration passed = at - begin_;
  if (passed < patience_.length) return false;
  const Duration used = time_of(cpu_);
  const bool starved = used - used_ < passed * patience_.share;
  begin_ = at;
  used_ = used;
  return starved;
}

bool be_idle(pid_t process) {
  const sched_param none{};
  return ::sched_setscheduler(process, SCHED_IDLE, &none) == 0;
}

void run_when_idle(const std::function<void(const std::stop_token& stop)>& work,
                   Patience patience) {
  std::promise<bool> promise;  // whether the work was begun
  std::future<bool> end = promise.get_future();
  std::jthread thread;
  try {
    thread = std::jthread([&](const std::stop_token& stop) {
      name_thread("idle");
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
