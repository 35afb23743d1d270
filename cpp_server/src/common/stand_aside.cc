#include "common/stand_aside.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>

namespace tessera {

namespace {

// What sched_setattr(2) takes; <linux/sched/types.h> and the <sched.h> of a newer glibc cannot be
// included together.
struct SchedulingAttributes {
  std::uint32_t size = sizeof(SchedulingAttributes);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime = 0;  // of a thread without deadlines: its slice, in nanoseconds
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
};

constexpr std::uint64_t kKeepPolicy = 0x08;  // SCHED_FLAG_KEEP_POLICY
// The longest one that Linux gives.
constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(100);

}  // namespace

void stand_aside() {
  const auto thread = static_cast<id_t>(::gettid());
  const int nice = std::max(::getpriority(PRIO_PROCESS, thread), kAsideNiceness);
  // Standing back needs no privilege.
  ::setpriority(PRIO_PROCESS, thread, nice);
  SchedulingAttributes attributes;
  attributes.flags = kKeepPolicy;
  attributes.nice = nice;
  attributes.runtime = static_cast<std::uint64_t>(kSlice.count());
  ::syscall(SYS_sched_setattr, 0, &attributes, 0);
}

void stand_aside(const std::function<void()>& work) {
  std::exception_ptr failure;
  std::thread thread;
  try {
    thread = std::thread([&] {
      stand_aside();
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
    });
  } catch (const std::system_error&) {
    work();
    return;
  }
  thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera
