#include "model/time_limit.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>

#include "common/text.h"
#include "common/thread_name.h"

namespace tessera {
namespace {

constexpr int kExitUserError = 2;

void end_unless_stopped(const std::stop_token& stop, std::chrono::duration<double> limit,
                        const std::string& line) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  const auto until = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit);
  stopped.wait_until(lock, stop, until, [] { return false; });
  if (stop.stop_requested()) return;
  // Nothing else can be done with a stderr that does not take it.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  std::_Exit(kExitUserError);
}

}  // namespace

TimeLimit::TimeLimit(const std::string& path, double seconds)
    : thread_([limit = std::chrono::duration<double>(seconds),
               line = text("tessera-server: error: package ", path,
                           ": its model ran longer than --load-timeout-s ", seconds,
                           " while it was loaded; do not use it, or give it more time\n")](
                  const std::stop_token& stop) {
        name_thread("load-limit");
        end_unless_stopped(stop, limit, line);
      }) {}

}  // namespace tessera
