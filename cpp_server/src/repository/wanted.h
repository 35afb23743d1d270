// Which versions of a model should be loaded, what to do next about it, and what a call's wish
// changes: pure functions of the folder, serving.yaml, control.json and the states.
//
// Contract: no state, no clock of their own, any thread, nothing blocks.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/status.h"
#include "repository/control.h"
#include "repository/control_record.h"
#include "repository/folder.h"
#include "repository/serving_config.h"

namespace tessera {

// What serving.yaml and control.json make of a folder together.
struct Wanted {
  std::set<Version> versions;  // empty: the model is unloaded, or has nothing to load
  Labels labels;               // control.json's win
  Shares traffic;
  std::optional<ShadowConfig> shadow;

  bool operator==(const Wanted&) const = default;
};

// The chosen of `present` without `remove`, with `add` and the versions of labels and shadow; they
// need not all be present. An unloaded model wants nothing.
Wanted wanted_versions(const std::set<Version>& present, const ServingConfig& config,
                       const ControlRecord& record);

// Where one version stands. Versions without one of these have never been loaded.
struct VersionStatus {
  VersionState state = VersionState::kUnavailable;
  Fingerprint file;           // of the model.pt that is loaded, is being loaded, or failed
  int failures = 0;           // of `file`, one after the other
  TimePoint failed_at = {};   // the last of them
  bool dropped = false;       // a call asked for this version's unload
};

using VersionStates = std::map<Version, VersionStatus>;

// What to do next about a model.
struct Plan {
  std::optional<Version> load;  // the next to load, or to load again
  std::set<Version> retire;     // to be unloaded once their last call has been answered
  TimePoint again = kNever;     // when a failed load may be tried again

  bool operator==(const Plan&) const = default;
};

// How long after the `failures`-th failure in a row a load is tried again: 1, 2, 4, ... 60 s.
Duration load_backoff(int failures);

// One load at a time: nothing to load while a version is kLoading. Versions are loaded in the order
// of first_to_load; those that have failed are tried again with `retry` after their back-off, and in
// any case when their file has changed (a ready version is loaded again then). A version that is not
// wanted any more retires once all wanted ones are ready; a dropped one at once.
Plan plan_model(const Wanted& wanted, const std::map<Version, Fingerprint>& present,
                const VersionStates& states, bool retry, TimePoint now);

// `versions` in the order in which they are loaded: the version that requests without a version go
// to (label `stable`), then the highest first.
std::vector<Version> first_to_load(const Wanted& wanted);

// What a call would change. `record` is only meaningful where `status` is OK.
struct Change {
  Status status;
  ControlRecord record;             // the one to write once `load` are ready
  std::set<Version> load;           // that must be ready before the call is done
  std::optional<Version> drop;      // to be unloaded afterwards, whatever else is wanted
};

// What a model looks like to a call.
struct ModelSituation {
  std::string model;
  std::set<Version> present;
  ServingConfig config;
  ControlRecord record;
  VersionStates states;
};

// RepositoryModelLoad with `request`; the table in docs/repository.md says what each does.
// NOT_FOUND: a version that is not in the folder. INVALID_ARGUMENT: parameters that do not go
// together. FAILED_PRECONDITION: nothing to go back to.
Change change_by_load(const ModelSituation& model, const LoadRequest& request);

// RepositoryModelUnload of `version`, or of the whole model. FAILED_PRECONDITION: a label or the
// shadow names the version.
Change change_by_unload(const ModelSituation& model, std::optional<Version> version);

}  // namespace tessera
