#include "package/file_hash.h"

#include <sys/resource.h>
#include <unistd.h>

#include <exception>
#include <utility>

namespace tessera {
namespace {

constexpr int kNiceness = 10;

}  // namespace

FileHash::FileHash(Compute compute)
    : thread_([this, compute = std::move(compute)](const std::stop_token& stop) {
        run(stop, compute);
      }) {}

std::string FileHash::known() const {
  const MutexLock lock(mutex_);
  return found_;
}

void FileHash::tell(Listener listener) {
  std::string found;
  {
    const MutexLock lock(mutex_);
    if (found_.empty()) {
      listeners_.push_back(std::move(listener));
      return;
    }
    found = found_;
  }
  listener(found);
}

void FileHash::run(const std::stop_token& stop, const Compute& compute) {
  // Linux gives threads a niceness of their own; where it is refused the thread runs as it is.
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNiceness);
  std::string found;
  try {
    found = compute(stop);
  } catch (const std::exception&) {
    return;
  }
  if (found.empty()) return;
  std::vector<Listener> listeners;
  {
    const MutexLock lock(mutex_);
    found_ = found;
    listeners.swap(listeners_);
  }
  for (const Listener& listener : listeners) listener(found);
}

}  // namespace tessera
