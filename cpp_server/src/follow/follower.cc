#include "follow/follower.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/thread_name.h"

namespace tessera {

Follower::Follower(Duration interval, Reload reload, const Log& log)
    : interval_(interval), reload_(std::move(reload)), log_(log), thread_([this] { run(); }) {}

Follower::~Follower() { stop(); }

void Follower::watch(std::vector<std::weak_ptr<ServedModel>> models) {
  const MutexLock lock(mutex_);
  models_ = std::move(models);
}

void Follower::stop() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Follower::run() {
  name_thread("follower");
  bool took = false;
  while (true) {
    std::vector<std::weak_ptr<ServedModel>> models;
    {
      const MutexLock lock(mutex_);
      if (!took && !stopped_) {
        changed_.wait_until(mutex_, std::chrono::steady_clock::now() + interval_);
      }
      if (stopped_) return;
      models = models_;
    }
    took = false;
    for (const auto& known : models) {
      const std::shared_ptr<ServedModel> model = share_of(known);
      if (model != nullptr) took = look(*model) || took;
    }
  }
}

std::shared_ptr<ServedModel> Follower::share_of(const std::weak_ptr<ServedModel>& known) {
  const MutexLock lock(mutex_);
  const bool watched = std::any_of(models_.begin(), models_.end(), [&](const auto& one) {
    return !one.owner_before(known) && !known.owner_before(one);
  });
  return watched ? known.lock() : nullptr;
}

bool Follower::look(ServedModel& model) const {
  try {
    switch (model.followed()->poll()) {
      case FollowedVersion::Outcome::kIdle: return false;
      case FollowedVersion::Outcome::kChanged: return true;
      case FollowedVersion::Outcome::kReload: reload_(model.name(), model.version()); return false;
    }
  } catch (const std::exception& error) {  // such as no thread to be had; tried again
    log_.client_warning(
        "follow_failed",
        {{"model", model.name()}, {"version", model.version()}, {"error", error.what()}});
  }
  return false;
}

}  // namespace tessera
