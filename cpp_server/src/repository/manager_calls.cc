// What calls ask of the repositories: carried out by the manager's thread, one after the other.
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "common/flags.h"
#include "common/text.h"
#include "repository/manager.h"

namespace tessera {
namespace {

std::string names_of(const std::map<std::string, std::unique_ptr<LiveModel>>& models) {
  std::string names;
  for (const auto& [name, model] : models) names += (names.empty() ? "'" : ", '") + name + "'";
  return names.empty() ? "none" : names;
}

}  // namespace

void RepositoryManager::load(const std::string& model, const LoadRequest& request, Done done) {
  ask({.model = model, .load = request, .version = {}, .done = std::move(done)});
}

void RepositoryManager::unload(const std::string& model, std::optional<Version> version,
                               Done done) {
  ask({.model = model, .load = {}, .version = version, .done = std::move(done)});
}

void RepositoryManager::ask(Call call) {
  Status refusal;
  if (config_.control != ModelControl::kExplicit) {
    refusal = {Code::kFailedPrecondition, text("--model-control is ", control_name(config_.control),
                                               "; start the server with explicit to allow this")};
  } else {
    const MutexLock lock(mutex_);
    if (closed_) {
      refusal = {Code::kUnavailable, "the server is draining"};
    } else if (calls_.size() >= kMaxWaitingCalls) {
      refusal = {Code::kResourceExhausted, text(kMaxWaitingCalls,
                                                " calls about repositories wait already; try again "
                                                "when one has been answered")};
    } else {
      calls_.push_back(std::move(call));
      changed_.notify_all();
      return;
    }
  }
  call.done(refusal);
}

void RepositoryManager::handle(const Call& call) {
  Status outcome;
  try {
    outcome = carry_out(call);
  } catch (const Stopped&) {
    outcome = {Code::kUnavailable, "the server is draining"};
  } catch (const std::exception& error) {
    const std::string id = new_error_id();
    log_.error("internal_error",
               {{"error_id", id}, {"model", call.model}, {"error", error.what()}});
    outcome = {Code::kInternal, text("internal error, id ", id, " in the server's log")};
  }
  if (!outcome.ok()) {
    log_.warning("repository_call_refused", {{"model", call.model}, {"error", outcome.message}});
  }
  call.done(outcome);
}

Status RepositoryManager::carry_out(const Call& call) {
  for (const auto& [name, version] : fixed_) {
    if (name != call.model) continue;
    return {Code::kFailedPrecondition,
            text("model '", name, "' was given with --model, which calls do not change")};
  }
  LiveModel* const model = find_model(call.model);
  if (model == nullptr) {
    return {Code::kNotFound,
            text("model '", call.model, "' is in no repository; there are ", names_of(models_))};
  }
  // What is wanted is not known, or was known of other files.
  if (!model->trouble().empty()) return {Code::kFailedPrecondition, model->trouble()};
  if (call.load.has_value() && call.load->rollback && call.load->rollback->commit) {
    if (call.load->version || !call.load->label.empty()) {
      return change_by_load(model->situation(), *call.load).status;  // says why not
    }
    return roll_back(*model, *call.load->rollback->version, *call.load->rollback->commit);
  }
  if (call.load.has_value()) return change(*model, change_by_load(model->situation(), *call.load));
  return change(*model, change_by_unload(model->situation(), call.version));
}

// Does what `wish` says, or nothing: the record is written once what it needs is ready, and only
// then does a version answer.
Status RepositoryManager::change(LiveModel& model, const Change& wish) {
  if (!wish.status.ok()) return wish.status;
  std::map<Version, std::shared_ptr<ServedModel>> loaded;
  Status refusal;
  for (const Version version : wish.load) {
    const VersionStatus& now = model.states[version];
    const auto file = model.folder.versions.find(version);
    if (file == model.folder.versions.end() && now.state == VersionState::kReady) continue;
    if (now.state == VersionState::kReady && now.loaded == file->second) continue;
    auto served = try_load(model, version);
    if (served == nullptr) {
      refusal = {Code::kFailedPrecondition,
                 text("version '", version, "' of model '", model.name(),
                      "' could not be loaded: ", model.reasons[version])};
      break;
    }
    loaded[version] = std::move(served);
  }
  if (refusal.ok() && wish.record != model.situation().record) {
    try {
      write_control_record(model.folder.path, wish.record);
    } catch (const UsageError& error) {
      refusal = {Code::kFailedPrecondition, error.what()};
    }
  }
  if (!refusal.ok()) {
    for (const auto& [version, served] : loaded) {
      VersionStatus& status = model.states[version];
      if (status.state == VersionState::kLoading) status.state = VersionState::kUnavailable;
    }
    loaded.clear();
    publish(model);
    return refusal;
  }
  model.set_record(wish.record);
  for (auto& [version, served] : loaded) put_in_place(model, version, std::move(served));
  if (wish.drop.has_value()) model.states[*wish.drop].dropped = true;
  publish(model);
  while (work_on(model)) {
  }
  wait_until_gone();  // the call is answered once what it has unloaded has answered its last call
  return {};
}

// The model called `name`, with its folder as it is now; null: no repository has one.
LiveModel* RepositoryManager::find_model(const std::string& name) {
  if (!is_model_name(name)) return nullptr;
  const auto known = models_.find(name);
  if (known != models_.end()) {
    std::error_code unknown;
    if (std::filesystem::is_directory(known->second->folder.path, unknown)) {
      read_model(*known->second, scan_model(known->second->folder.path, name));
    }
    return known->second.get();
  }
  for (const std::string& repository : config_.repositories) {
    const std::string path = text(repository, "/", name);
    std::error_code unknown;
    if (!std::filesystem::is_directory(path, unknown)) continue;
    ModelFolder found = scan_model(path, name);
    LiveModel& model = *models_.emplace(name, std::make_unique<LiveModel>(found)).first->second;
    read_model(model, std::move(found));
    return &model;
  }
  return nullptr;
}

}  // namespace tessera
