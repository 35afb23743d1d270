// Versions that follow their logs of commits, as far as the manager brings them in, loads them
// again and takes them back.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/flags.h"
#include "common/text.h"
#include "follow/fence.h"
#include "follow/log_listing.h"
#include "repository/manager.h"

namespace tessera {
namespace {

// Fences off the commits behind `commit` that are in the folder `log`, or were taken from there;
// gives those that were not fenced before. Throws UsageError.
Fence fence_off(const std::string& log, CommitNumber commit,
                const std::map<CommitNumber, std::string>& applied) {
  const Fence known = read_fence(log);
  Fence more;
  for (auto taken = applied.upper_bound(commit); taken != applied.end(); ++taken) {
    if (!known.contains(taken->first)) more.insert(*taken);
  }
  for (const CommitNumber number : scan_log(log)) {
    if (number <= commit || known.contains(number) || more.contains(number)) continue;
    more[number] = commit_sha256(text(log, "/", commit_name(number))).value_or("");
  }
  if (!more.empty()) write_fence(log, more);
  return more;
}

}  // namespace

void RepositoryManager::start_following() {
  follower_ = std::make_unique<Follower>(
      std::chrono::milliseconds(config_.follow_poll_ms),
      [this](const std::string& model, const std::string& version) {
        const MutexLock lock(mutex_);
        reloads_.emplace(model, version);
        changed_.notify_all();
      },
      log_);
}

// Takes all commits that are there already: whoever finds `served` finds it at the log's end.
void RepositoryManager::begin_to_follow(const LiveModel& model, Version version,
                                        ServedModel& served) {
  if (served.commit_lock() == nullptr) {
    log_.warning("not_followed", {{"model", model.name()},
                                  {"version", std::to_string(version)},
                                  {"device", served.manifest().device}});
    return;
  }
  const std::string& base = served.base_sha256();
  FollowedVersion::Options options = follow_options_;
  options.stopping = [this] { return stopping_.load(); };
  auto followed = std::make_unique<FollowedVersion>(
      LogState{.model = model.name(), .version = version, .base = base, .sha256 = base},
      model.folder.log_path(version),
      FollowedVersion::Model{.schema = served.manifest().schema,
                             .runner = served.runner(),
                             .commits = *served.commit_lock(),
                             .metrics = served.metrics().follow},
      std::move(options), undo_, clock_, log_);
  while (followed->poll() == FollowedVersion::Outcome::kChanged) {
  }
  if (stopping_) throw Stopped();  // there may be more
  served.follow(std::move(followed));
}

// The follower has asked for it, perhaps before the version was loaded again.
void RepositoryManager::reload_if_it_must(const std::string& name, const std::string& version) {
  const auto model = models_.find(name);
  const std::optional<Version> number = parse_version(version);
  if (model == models_.end() || !number) return;
  const auto served = model->second->ready.find(*number);
  if (served == model->second->ready.end() || served->second->followed() == nullptr) return;
  if (served->second->followed()->must_reload()) load_again(*model->second, *number);
}

// A version whose undo records do not reach as far as its fence.
void RepositoryManager::load_again(LiveModel& model, Version version) {
  auto served = try_load(model, version);
  if (served != nullptr) put_in_place(model, version, std::move(served));
  publish(model);
}

// The logs of all versions that answer are looked at from now on.
void RepositoryManager::watch() {
  if (follower_ == nullptr) return;
  std::vector<std::weak_ptr<ServedModel>> followed;
  for (const auto& [name, model] : models_) {
    for (const auto& [version, served] : model->ready) {
      if (served->followed() != nullptr) followed.emplace_back(served);
    }
  }
  follower_->watch(std::move(followed));
}

// Makes `commit` (0: the package itself) the last one of `version`, which then answers: fences off
// what comes behind it, so that no server takes it again, and goes back at once.
Status RepositoryManager::roll_back(LiveModel& model, Version version, CommitNumber commit) {
  const std::string state = text(version, ".", commit);
  if (follower_ == nullptr) {
    return {Code::kFailedPrecondition,
            "rollback to a commit needs --follow; start the server with it, or name a version"};
  }
  const LoadRequest to_version{.rollback = Rollback{.version = version, .commit = {}}};
  if (!model.folder.versions.contains(version)) {
    return change_by_load(model.situation(), to_version).status;  // NOT_FOUND, with what there is
  }
  const auto ready = model.ready.find(version);
  if (ready == model.ready.end() || ready->second->followed() == nullptr) {
    return {Code::kFailedPrecondition,
            text("version '", version, "' of model '", model.name(),
                 "' is not loaded; load it, and then go back to '", state, "'")};
  }
  const bool answers =
      answering_version(model.wanted, model.ready_versions()) == std::optional(version);
  const FollowedVersion::State now = ready->second->followed()->state();
  if (commit != 0 && !now.applied.contains(commit)) {
    return {Code::kNotFound, text("model '", model.name(), "' has no state '", state, "'; version ",
                                  version, " is at ", version, ".", now.number)};
  }
  Fence fenced;
  try {
    fenced = fence_off(model.folder.log_path(version), commit, now.applied);
  } catch (const UsageError& error) {
    return {Code::kFailedPrecondition, error.what()};
  }
  if (fenced.empty() && answers) {
    return {Code::kFailedPrecondition,
            text("state '", state, "' of model '", model.name(), "' answers already")};
  }
  if (!obey_fence(model, version, fenced)) {
    return {Code::kFailedPrecondition,
            text("state '", state, "' of model '", model.name(),
                 "' cannot be gone back to yet, later commits are fenced off: ",
                 model.reasons[version])};
  }
  return answers ? Status{} : change(model, change_by_load(model.situation(), to_version));
}

// Whether `version` has none of the commits of `fenced` any more.
bool RepositoryManager::obey_fence(LiveModel& model, Version version, const Fence& fenced) {
  const auto obeys = [&] {
    const auto taken = model.ready.at(version)->followed()->state().applied;
    return std::none_of(fenced.begin(), fenced.end(),
                        [&](const auto& one) { return taken.contains(one.first); });
  };
  if (!obeys()) model.ready.at(version)->followed()->poll();  // the follower may have been faster
  if (!obeys()) load_again(model, version);
  return obeys();
}

}  // namespace tessera
