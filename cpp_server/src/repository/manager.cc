#include "repository/manager.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <system_error>

#include "common/stand_aside.h"
#include "common/text.h"
#include "common/thread_name.h"

namespace tessera {
namespace {

// How often it is looked whether the last call of a version has been answered.
constexpr Duration kLeavingLook = std::chrono::milliseconds(5);
// How long nothing is done after something has gone wrong.
constexpr Duration kTroublePatience = std::chrono::seconds(1);

}  // namespace

RepositoryManager::RepositoryManager(const ServerConfig& config, std::vector<Fixed> fixed,
                                     Registry& registry, ModelList& list, Load load, WarmUp warm_up,
                                     Listener listener, const Clock& clock, const Log& log,
                                     FollowedVersion::Options follow)
    : config_(config),
      fixed_(std::move(fixed)),
      registry_(registry),
      list_(list),
      load_(std::move(load)),
      warm_up_(std::move(warm_up)),
      listener_(std::move(listener)),
      clock_(clock),
      log_(log),
      follow_options_(std::move(follow)),
      undo_(static_cast<std::uint64_t>(config.rollback_bytes)),
      shown_(std::make_unique<Shown>()) {}

RepositoryManager::~RepositoryManager() { stop(); }

void RepositoryManager::start() {
  if (config_.follow) start_following();
  thread_ = std::thread([this] { run(); });
}

void RepositoryManager::rescan() {
  const MutexLock lock(mutex_);
  rescan_ = true;
  changed_.notify_all();
}

void RepositoryManager::begin_stop() {
  stopping_ = true;
  std::deque<Call> left;
  {
    const MutexLock lock(mutex_);
    closed_ = true;
    left.swap(calls_);
    changed_.notify_all();
  }
  for (const Call& call : left) call.done({Code::kUnavailable, "the server is draining"});
}

void RepositoryManager::stop() {
  begin_stop();
  if (thread_.joinable()) thread_.join();
  if (follower_ != nullptr) follower_->stop();
  for (const Leaving& version : leaving_) version.model->close();
}

void RepositoryManager::run() {
  name_thread("repository");
  try {
    serve();
  } catch (const Stopped&) {
    log_.info("load_stopped");
  }
}

void RepositoryManager::serve() {
  attempt([&] {
    read_folders();
    work_off();
  });
  if (stopping_) return;
  started_ = true;
  registry_.set_starting(false);
  listener_.started();
  while (!stopping_) attempt([&] { turn(); });
}

// Nothing that goes wrong on its thread, for want of memory above all, ends a server that answers.
void RepositoryManager::attempt(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    log_.error("repository_failed", {{"error", error.what()}});
    const MutexLock lock(mutex_);
    if (!closed_) changed_.wait_until(mutex_, clock_.now() + kTroublePatience);
  }
}

// Waits, and does what there is to do then.
void RepositoryManager::turn() {
  wait();
  std::optional<Call> call;
  std::set<std::pair<std::string, std::string>> reloads;
  bool read = config_.control == ModelControl::kPoll && clock_.now() >= next_read_;
  {
    const MutexLock lock(mutex_);
    if (!calls_.empty()) {
      call = std::move(calls_.front());
      calls_.pop_front();
    }
    reloads.swap(reloads_);
    read = read || rescan_;
    rescan_ = false;
  }
  if (call.has_value()) handle(*call);
  for (const auto& [name, version] : reloads) reload_if_it_must(name, version);
  if (read) read_folders();
  let_go();
  work_off();
}

// Waits for something to do.
void RepositoryManager::wait() {
  TimePoint until = again_;
  if (config_.control == ModelControl::kPoll) until = std::min(until, next_read_);
  if (!leaving_.empty()) until = std::min(until, clock_.now() + kLeavingLook);
  const MutexLock lock(mutex_);
  if (!calls_.empty() || !reloads_.empty() || rescan_ || closed_) return;
  if (until == kNever) {
    changed_.wait(mutex_);
  } else {
    changed_.wait_until(mutex_, until);
  }
}

void RepositoryManager::remark(const std::string& line) {
  constexpr std::size_t kMost = 1'000;  // texts that are remembered
  if (remarks_.size() >= kMost) remarks_.clear();
  if (remarks_.insert(line).second) log_.warning("repository", {{"remark", line}});
}

void RepositoryManager::read_model(LiveModel& model, ModelFolder found) {
  for (const std::string& line : found.remarks) remark(line);
  const LiveModel::Reading reading = model.read(std::move(found));
  for (const std::string& line : reading.troubles) remark(line);
  if (reading.changed || !model.told_serving.has_value()) publish(model);
}

void RepositoryManager::read_folders() {
  next_read_ = clock_.now() +
               std::chrono::duration_cast<Duration>(std::chrono::duration<double>(config_.poll_s));
  std::set<std::string> seen;
  for (const auto& [name, version] : fixed_) seen.insert(name);
  for (const std::string& path : config_.repositories) {
    std::error_code trouble;
    const std::filesystem::directory_iterator readable(path, trouble);
    if (trouble) {  // what is served of it stays
      remark(text("the repository ", path, " cannot be read: ", trouble.message()));
      for (const auto& [name, model] : models_) {
        if (model->folder.path.starts_with(path + "/")) seen.insert(name);
      }
      continue;
    }
    RepositoryFolder folder = scan_repository(path);
    for (const std::string& line : folder.remarks) remark(line);
    for (ModelFolder& found : folder.models) {
      if (!seen.insert(found.name).second) {
        remark(text(found.path, " is not served: there is another model '", found.name, "'"));
        continue;
      }
      auto& model = models_[found.name];
      if (model == nullptr) model = std::make_unique<LiveModel>(found);
      read_model(*model, std::move(found));
    }
  }
  for (const auto& [name, model] : models_) {
    if (seen.contains(name)) continue;
    if (model->wanted == nothing_wanted() && model->folder.versions.empty()) continue;
    model->lose_folder();
    publish(*model);
  }
}

void RepositoryManager::work_off() {
  again_ = kNever;
  for (bool more = true; more && !stopping_;) {
    more = false;
    for (const auto& [name, model] : models_) more = work_on(*model) || more;
  }
  // Models whose folder is not there, once nothing of them is loaded.
  for (auto entry = models_.begin(); entry != models_.end();) {
    const LiveModel& model = *entry->second;
    std::error_code unknown;
    if (!model.holds_any() && model.folder.versions.empty() &&
        !std::filesystem::exists(model.folder.path, unknown)) {
      registry_.remove(model.name());
      listener_.gone(model.name());
      log_.info("model_gone", {{"model", model.name()}});
      counts_.erase(model.name());
      entry = models_.erase(entry);
      show();
    } else {
      ++entry;
    }
  }
}

// Takes the next step of `model`; false: there is none now.
bool RepositoryManager::work_on(LiveModel& model) {
  if (stopping_) return false;
  const bool retry = config_.control == ModelControl::kPoll;
  const Plan plan =
      plan_model(model.wanted, model.folder.versions, model.states, retry, clock_.now());
  again_ = std::min(again_, plan.again);
  for (const Version version : plan.retire) retire(model, version, /*replaced=*/false);
  if (!plan.retire.empty()) publish(model);
  if (!plan.load.has_value()) return false;
  if (auto served = try_load(model, *plan.load); served != nullptr) {
    put_in_place(model, *plan.load, std::move(served));
  }
  publish(model);
  return true;
}

// Null: it failed, and model.reasons says why. Throws Stopped.
std::shared_ptr<ServedModel> RepositoryManager::try_load(LiveModel& model, Version version) {
  wait_until_gone();
  const std::string name = std::to_string(version);
  const auto file = model.folder.versions.find(version);
  if (file == model.folder.versions.end()) {
    model.reasons[version] = "it is not in its folder";
    return nullptr;
  }
  const std::string path = model.folder.package_path(version);
  VersionStatus& status = model.states[version];
  if (status.state != VersionState::kReady) status.state = VersionState::kLoading;
  model.reasons.erase(version);
  progress_ = 0;
  publish(model);
  log_.info("load", {{"model", model.name()}, {"version", name}, {"path", path}});
  try {
    check_room(path, file->second.bytes);
    const auto progress = [this](double share) {
      if (stopping_) throw Stopped();
      progress_ = share;
    };
    LoadedPackage package = load(path, progress);
    const double took = seconds(package.load_time);
    const auto steps = package.steps;
    const auto metrics = list_.add(model.name(), name);
    auto served = std::make_shared<ServedModel>(std::move(package), model.limited(config_), metrics,
                                                clock_, log_);
    if (config_.follow) begin_to_follow(model, version, *served);
    log_.info("loaded", {{"model", model.name()}, {"version", name}, {"seconds", took}});
    for (const auto& [step, time] : steps) {
      log_.debug(
          "load_step",
          {{"model", model.name()}, {"version", name}, {"step", step}, {"seconds", seconds(time)}});
    }
    if (warm_up_ != nullptr) warm_up_(model.name(), *served);
    ++counts_[model.name()].ok;
    return served;
  } catch (const Stopped&) {
    if (status.state == VersionState::kLoading) status.state = VersionState::kUnavailable;
    throw;
  } catch (const std::bad_alloc&) {
    note_failure(model, version, text("package ", path, ": there is no memory for it"));
  } catch (const std::exception& error) {
    note_failure(model, version, error.what());
  }
  return nullptr;
}

LoadedPackage RepositoryManager::load(const std::string& path, const Progress& progress) {
  if (!started_) return load_(path, progress, /*beside=*/false);
  std::optional<LoadedPackage> package;
  stand_aside([&] { package = load_(path, progress, /*beside=*/true); });
  return std::move(*package);
}

void RepositoryManager::check_room(const std::string& path, std::int64_t bytes) const {
  if (config_.max_model_bytes == 0) return;
  std::int64_t held = 0;
  for (const auto& [name, model] : models_) {
    for (const auto& [version, served] : model->ready) held += model->states[version].loaded.bytes;
  }
  for (const Leaving& version : leaving_) held += version.bytes;
  if (held + bytes <= config_.max_model_bytes) return;
  throw UsageError(text("package ", path, ": has ", bytes, " bytes, loaded versions have ", held,
                        "; together that is more than --max-model-bytes ", config_.max_model_bytes,
                        "; unload a version or allow more"));
}

void RepositoryManager::note_failure(LiveModel& model, Version version, const std::string& reason) {
  VersionStatus& status = model.states[version];
  if (status.state == VersionState::kLoading) status.state = VersionState::kUnavailable;
  const Fingerprint& file = model.folder.versions.at(version);
  status.failures = status.failures > 0 && status.failed == file ? status.failures + 1 : 1;
  status.failed = file;
  status.failed_at = clock_.now();
  model.reasons[version] = reason;
  ++counts_[model.name()].failed;
  log_.error("load_failed", {{"model", model.name()},
                             {"version", std::to_string(version)},
                             {"error", reason},
                             {"failures", std::int64_t{status.failures}}});
}

// `served` answers as `version` from the next publish on.
void RepositoryManager::put_in_place(LiveModel& model, Version version,
                                     std::shared_ptr<ServedModel> served) {
  if (model.ready.contains(version)) retire(model, version, /*replaced=*/true);
  served->metrics().ready = true;
  served->metrics().follow.followed = served->followed() != nullptr;
  if (served->followed() != nullptr) served->followed()->set_shown(true);
  served->log_file_hash();
  VersionStatus& status = model.states[version];
  status = {.state = VersionState::kReady, .loaded = model.folder.versions.at(version)};
  model.ready[version] = std::move(served);
}

void RepositoryManager::retire(LiveModel& model, Version version, bool replaced) {
  const auto found = model.ready.find(version);
  VersionStatus& status = model.states[version];
  if (found == model.ready.end()) return;
  if (found->second->followed() != nullptr) found->second->followed()->set_shown(false);
  if (!replaced) {
    found->second->metrics().follow.followed = false;
    found->second->metrics().ready = false;
    status.state = VersionState::kUnloading;
  }
  leaving_.push_back({.name = model.name(),
                      .version = version,
                      .replaced = replaced,
                      .bytes = status.loaded.bytes,
                      .model = std::move(found->second)});
  model.ready.erase(found);
}

// Destroys what answers no call any more.
void RepositoryManager::let_go() {
  for (auto version = leaving_.begin(); version != leaving_.end();) {
    if (version->model.use_count() > 1) {
      ++version;
      continue;
    }
    Leaving gone = std::move(*version);
    version = leaving_.erase(version);
    const TimePoint begin = clock_.now();
    // Nobody can find it, so this share is the last.
    stand_aside([&] {
      if (listener_.left != nullptr) listener_.left(gone.model->give_up());
      gone.model.reset();
    });
    log_.info("unloaded", {{"model", gone.name},
                           {"version", std::to_string(gone.version)},
                           {"seconds", seconds(clock_.now() - begin)}});
    const auto model = models_.find(gone.name);
    if (gone.replaced || model == models_.end()) continue;
    model->second->states.erase(gone.version);
    publish(*model->second);
  }
}

// Waits until no version is leaving, so that there is never more than one version beside those that
// are wanted.
void RepositoryManager::wait_until_gone() {
  while (!leaving_.empty()) {
    if (stopping_) throw Stopped();
    let_go();
    if (!leaving_.empty()) std::this_thread::sleep_for(kLeavingLook);
  }
}

}  // namespace tessera
