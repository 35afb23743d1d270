#include "common/stand_aside.h"

#include <sys/resource.h>
#include <unistd.h>

#include <exception>
#include <system_error>
#include <thread>

#include "common/thread_name.h"

namespace tessera {

void stand_aside() {
  const auto thread = static_cast<id_t>(::gettid());
  if (::getpriority(PRIO_PROCESS, thread) >= kAsideNiceness) return;
  // Standing back needs no privilege.
  ::setpriority(PRIO_PROCESS, thread, kAsideNiceness);
}

void stand_aside(const std::function<void()>& work) {
  std::exception_ptr failure;
  std::thread thread;
  try {
    thread = std::thread([&] {
      name_thread("aside");
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
