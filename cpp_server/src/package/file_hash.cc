#include "package/file_hash.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/stand_aside.h"
#include "common/thread_name.h"
#include "csrc/idle_thread.h"

namespace tessera {
namespace {

// More than anybody goes to and fro between.
constexpr std::size_t kMostKnown = 1'024;

}  // namespace

std::string FileHashes::of(const std::string& identity) const {
  const MutexLock lock(mutex_);
  const auto found = std::find_if(known_.begin(), known_.end(),
                                  [&](const auto& one) { return one.first == identity; });
  return found != known_.end() ? found->second : "";
}

void FileHashes::add(std::string identity, std::string sha256) {
  const MutexLock lock(mutex_);
  if (known_.size() == kMostKnown) known_.pop_front();
  known_.emplace_back(std::move(identity), std::move(sha256));
}

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
  name_thread("file-hash");
  stand_aside();
  be_idle();
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
