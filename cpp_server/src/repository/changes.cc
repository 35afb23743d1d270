#include "repository/changes.h"

#include <algorithm>

#include "common/text.h"

namespace tessera {
namespace {

Change refused(Code code, const std::string& why) {
  Change change;
  change.status = {code, why};
  return change;
}

std::string version_of_model(Version version, const ModelSituation& situation) {
  return text("version '", version, "' of model '", situation.model, "'");
}

// The first name, other than `but`, under which `record` leaves `version` wanted; empty: none.
std::string name_of(Version version, const ModelSituation& situation, const ControlRecord& record,
                    std::string_view but = {}) {
  const Wanted wanted = wanted_versions(situation.present, situation.config, record);
  for (const auto& [label, named] : wanted.labels) {
    if (named == version && label != but) return "the label '" + label + "'";
  }
  if (wanted.shadow && wanted.shadow->version == version) return "serving.yaml's shadow";
  return {};
}

bool loaded_or_present(Version version, const ModelSituation& situation) {
  return situation.present.contains(version) || situation.states.contains(version);
}

Change missing(Version version, const ModelSituation& situation) {
  std::string there;
  for (const Version one : situation.present) {
    there += (there.empty() ? "'" : ", '") + std::to_string(one) + "'";
  }
  return refused(Code::kNotFound,
                 text(version_of_model(version, situation), " is not in its folder, which has ",
                      there.empty() ? "none" : there));
}

// `record` with `version` asked for.
void ask_for(ControlRecord& record, Version version) {
  record.unloaded = false;
  record.remove.erase(version);
}

// The version that requests without a version go to; nothing: none is ready.
std::optional<Version> answering(const ModelSituation& situation) {
  std::set<Version> ready;
  for (const auto& [version, status] : situation.states) {
    if (status.state == VersionState::kReady) ready.insert(version);
  }
  return answering_version(wanted_versions(situation.present, situation.config, situation.record),
                           ready);
}

// Where a rollback to no particular version leads; nothing: there is no such version.
std::optional<Version> previous(const ModelSituation& situation, Version answering) {
  for (auto at = situation.present.rbegin(); at != situation.present.rend(); ++at) {
    // What an earlier rollback left is not chosen again.
    if (*at < answering && !situation.record.remove.contains(*at)) return *at;
  }
  return std::nullopt;
}

Change no_previous(const ModelSituation& situation, std::optional<Version> current) {
  const std::string below = current ? text(" below ", *current, ", which answers,")
                                    : " that answers, and so none before it";
  return refused(Code::kFailedPrecondition,
                 text("model '", situation.model, "' has no version", below,
                      " to go back to; name the version that you want"));
}

Change roll_back(const ModelSituation& situation, const Rollback& rollback) {
  const std::optional<Version> current = answering(situation);
  std::optional<Version> target = rollback.version;
  if (!target && current) target = previous(situation, *current);
  if (!target) return no_previous(situation, current);
  if (!situation.present.contains(*target)) return missing(*target, situation);
  if (target == current) {
    return refused(Code::kFailedPrecondition,
                   text(version_of_model(*target, situation), " answers already"));
  }
  Change change{.status = {}, .record = situation.record, .load = {*target}, .drop = current};
  ask_for(change.record, *target);
  change.record.labels.insert_or_assign(std::string(kStableLabel), *target);
  if (!current) return change;
  const std::string name = name_of(*current, situation, change.record);
  if (!name.empty()) {
    return refused(Code::kFailedPrecondition,
                   text(version_of_model(*current, situation), " cannot be rolled back: ", name,
                        " names it; move that first"));
  }
  change.record.add.erase(*current);
  change.record.remove.insert(*current);
  return change;
}

}  // namespace

Change change_by_load(const ModelSituation& situation, const LoadRequest& request) {
  if (request.rollback) {
    if (request.version || !request.label.empty()) {
      return refused(Code::kInvalidArgument,
                     "rollback goes with neither version nor label; give rollback alone");
    }
    return roll_back(situation, *request.rollback);
  }
  Change change{.status = {}, .record = situation.record, .load = {}, .drop = {}};
  if (!request.version) {
    if (!request.label.empty()) {
      return refused(Code::kInvalidArgument, "label needs to know whose it is; give version, too");
    }
    change.record.unloaded = false;
    change.load = wanted_versions(situation.present, situation.config, change.record).versions;
    return change;
  }
  const Version version = *request.version;
  if (!situation.present.contains(version)) return missing(version, situation);
  ask_for(change.record, version);
  change.record.add.insert(version);
  if (!request.label.empty()) change.record.labels[request.label] = version;
  change.load = {version};
  return change;
}

Change change_by_unload(const ModelSituation& situation, std::optional<Version> version) {
  Change change{.status = {}, .record = situation.record, .load = {}, .drop = version};
  if (!version) {
    change.record.unloaded = true;
    return change;
  }
  if (!loaded_or_present(*version, situation)) return missing(*version, situation);
  const std::string name = name_of(*version, situation, situation.record);
  if (!name.empty()) {
    return refused(Code::kFailedPrecondition,
                   text(version_of_model(*version, situation), " cannot be unloaded: ", name,
                        " names it; move that first"));
  }
  change.record.add.erase(*version);
  change.record.remove.insert(*version);
  return change;
}

}  // namespace tessera
