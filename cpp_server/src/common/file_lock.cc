#include "common/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "common/flags.h"
#include "common/text.h"

namespace tessera {
namespace {

constexpr Duration kPause = std::chrono::milliseconds(10);

int open_file(const std::string& path) {
  // To write, as network file systems lock for others than readers only then.
  int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0 && errno == EACCES) {  // another user's
    file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  }
  if (file < 0) throw UsageError(text(path, ": cannot be opened (", std::strerror(errno), ")"));
  return file;
}

}  // namespace

FileLock::FileLock(const std::string& path, Duration patience) : file_(open_file(path)) {
  const TimePoint end = std::chrono::steady_clock::now() + patience;
  while (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return;  // there are no locks here
    if (std::chrono::steady_clock::now() >= end) {
      ::close(file_);
      throw UsageError(text(path, ": another process has held this lock for ", seconds(patience),
                            " s; try again, or end that process"));
    }
    std::this_thread::sleep_for(kPause);
  }
}

FileLock::~FileLock() {
  ::flock(file_, LOCK_UN);  // a process that was begun meanwhile may have the descriptor, too
  ::close(file_);
}

}  // namespace tessera
