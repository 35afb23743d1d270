#include "repository/live_model.h"

#include <algorithm>
#include <utility>

#include "common/text.h"

namespace tessera {
namespace {

// Appends `more` to `reason`, behind a semicolon where there is something.
void join(std::string& reason, const std::string& more) {
  if (!reason.empty() && !more.empty()) reason += "; ";
  reason += more;
}

}  // namespace

LiveModel::Reading LiveModel::read(ModelFolder found) {
  const Wanted wanted_before = wanted;
  const std::string trouble_before = trouble_;
  const bool same_files = folder.versions == found.versions;
  folder = std::move(found);
  std::vector<std::string> troubles;
  try {
    config_ = read_serving_config(folder.path);
  } catch (const UsageError& error) {
    troubles.emplace_back(error.what());
  }
  try {
    record_ = read_control_record(folder.path);
  } catch (const UsageError& error) {
    troubles.emplace_back(error.what());
  }
  trouble_.clear();
  for (const std::string& one : troubles) join(trouble_, one);
  decide();
  forget_absent();
  const bool changed = !same_files || wanted != wanted_before || trouble_ != trouble_before;
  return {.changed = changed, .troubles = std::move(troubles)};
}

// What is known of versions that are neither loaded nor in the folder.
void LiveModel::forget_absent() {
  std::erase_if(states, [&](const auto& known) {
    return !folder.versions.contains(known.first) && !holds(known.first);
  });
  std::erase_if(reasons, [&](const auto& known) { return !states.contains(known.first); });
}

bool LiveModel::holds(Version version) const {
  const auto known = states.find(version);
  return known != states.end() && known->second.state != VersionState::kUnavailable;
}

bool LiveModel::holds_any() const {
  return std::any_of(states.begin(), states.end(),
                     [&](const auto& known) { return holds(known.first); });
}

void LiveModel::lose_folder() {
  folder.versions.clear();
  trouble_.clear();
  wanted = nothing_wanted();
  forget_absent();
}

void LiveModel::set_record(ControlRecord changed) {
  record_ = std::move(changed);
  decide();
}

void LiveModel::decide() {
  // A model of which it is not known what is wanted is not served, and what is loaded stays.
  const bool known = config_.has_value() && record_.has_value();
  wanted = known ? wanted_versions(present(), *config_, *record_) : Wanted();
}

ServerConfig LiveModel::limited(const ServerConfig& config) const {
  ServerConfig own = config;
  if (config_.has_value()) config_->batching.apply(own.batch_limits, own.queue_limits);
  return own;
}

std::set<Version> LiveModel::present() const {
  std::set<Version> versions;
  for (const auto& [version, file] : folder.versions) versions.insert(version);
  return versions;
}

ModelSituation LiveModel::situation() const {
  return {.model = name(),
          .present = present(),
          .config = config_.value_or(ServingConfig()),
          .record = record_.value_or(ControlRecord()),
          .states = states};
}

std::set<Version> LiveModel::ready_versions() const {
  std::set<Version> versions;
  for (const auto& [version, model] : ready) versions.insert(version);
  return versions;
}

Routes LiveModel::routes() const {
  std::set<Version> answering = ready_versions();
  NotReady not_ready;
  for (const Version version : wanted.versions) {
    if (answering.contains(version)) continue;
    // The reason names files of this host, which only the index's readers are to know.
    not_ready[version] = reasons.contains(version)
                             ? "could not be loaded; the repository's index says why"
                         : folder.versions.contains(version) ? "is still loading"
                                                             : "is not in its folder";
  }
  return {name(), std::move(answering), std::move(not_ready), wanted};
}

std::vector<IndexEntry> LiveModel::index() const {
  std::set<Version> versions = present();
  versions.insert(wanted.versions.begin(), wanted.versions.end());
  for (const auto& [version, status] : states) versions.insert(version);
  std::vector<IndexEntry> entries;
  for (const Version version : versions) {
    IndexEntry& entry = entries.emplace_back();
    entry.model = name();
    entry.version = std::to_string(version);
    if (const auto known = states.find(version); known != states.end()) {
      entry.state = known->second.state;
    }
    if (const auto failed = reasons.find(version); failed != reasons.end()) {
      entry.reason = failed->second;
    } else if (wanted.versions.contains(version) && !folder.versions.contains(version)) {
      entry.reason = "it is not in its folder";
    } else if (entry.state == VersionState::kUnavailable && !wanted.versions.contains(version)) {
      entry.reason = "it is not wanted";
    }
    join(entry.reason, trouble_);
    for (const auto& [label, of] : wanted.labels) {
      if (of != version) continue;
      entry.labels.push_back(label);
      if (const auto share = wanted.traffic.find(label); share != wanted.traffic.end()) {
        entry.percent += share->second;
      }
    }
    entry.shadow = wanted.shadow.has_value() && wanted.shadow->version == version;
  }
  if (entries.empty()) {
    IndexEntry& entry = entries.emplace_back();
    entry.model = name();
    entry.reason = trouble_.empty() ? "its folder has no version" : trouble_;
  }
  return entries;
}

}  // namespace tessera
