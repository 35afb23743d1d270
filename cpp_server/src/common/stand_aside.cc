#include "common/stand_aside.h"

#include <sys/resource.h>
#include <unistd.h>

#include <exception>
#include <thread>

namespace tessera {

void stand_aside(const std::function<void()>& work, int niceness) {
  std::exception_ptr failure;
  std::thread thread([&] {
    // Standing back needs no privilege; where it is refused the thread runs as it is.
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), niceness);
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera
