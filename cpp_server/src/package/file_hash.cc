#include "package/file_hash.h"

#include <sys/resource.h>
#include <unistd.h>

#include <exception>
#include <utility>

namespace tessera {
namespace {

constexpr int kNiceness = 19;

}  // namespace

FileHash::FileHash(Compute compute)
    : thread_([this, compute = std::move(compute)](const std::stop_token& stop) {
        run(stop, compute);
      }) {}

std::string FileHash::known() const {
  const MutexLock lock(mutex_);
  return result_ ? result_->sha256 : "";
}

void FileHash::tell(Listener listener) {
  Result result;
  {
    const MutexLock lock(mutex_);
    if (!result_) {
      listeners_.push_back(std::move(listener));
      return;
    }
    result = *result_;
  }
  listener(result);
}

void FileHash::run(const std::stop_token& stop, const Compute& compute) {
  // Linux gives threads a niceness of their own; where it is refused the thread runs as it is.
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNiceness);
  Result result;
  try {
    result.sha256 = compute(stop);
    if (result.sha256.empty()) return;
  } catch (const std::exception& error) {
    result.failure = error.what();
  }
  std::vector<Listener> listeners;
  {
    const MutexLock lock(mutex_);
    result_ = result;
    listeners.swap(listeners_);
  }
  for (const Listener& listener : listeners) listener(result);
}

}  // namespace tessera
