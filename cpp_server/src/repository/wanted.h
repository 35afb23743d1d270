// Which versions of a model should be loaded, and what to do next about it: pure functions of the
// folder, serving.yaml, control.json and the states.
//
// Contract: no state, no clock of their own, any thread, nothing blocks.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "common/clock.h"
#include "repository/control.h"
#include "repository/control_record.h"
#include "repository/folder.h"
#include "repository/serving_config.h"

namespace tessera {

// Requests without a version go to the version of this label.
inline constexpr std::string_view kStableLabel = "stable";

// What serving.yaml and control.json make of a folder together.
struct Wanted {
  std::set<Version> versions = {};
  // Whether the model is to have no version where `versions` is empty: its folder is gone, or a
  // call has unloaded it or its versions. False: nothing that could be chosen is there, and what is
  // loaded stays.
  bool may_be_none = false;
  Labels labels = {};  // control.json's win
  Shares traffic = {};
  std::optional<ShadowConfig> shadow = {};

  std::set<Version> added = {};  // of `versions`, those that a call has asked for

  // Whether `version` is the shadow's, and neither a label nor a call asks for it: it answers only
  // those who name it.
  bool shadow_alone(Version version) const;

  bool operator==(const Wanted&) const = default;
};

// The chosen of `present` without `remove`, with `add` and the versions of labels and shadow; they
// need not all be present. The version of the shadow alone is not chosen: it must not take the
// place of one that answers. An unloaded model wants nothing.
Wanted wanted_versions(const std::set<Version>& present, const ServingConfig& config,
                       const ControlRecord& record);

// What is wanted of a model whose folder is not there any more: nothing.
Wanted nothing_wanted();

// Where one version stands. A version without one of these has never been loaded, nor failed.
struct VersionStatus {
  VersionState state = VersionState::kUnavailable;  // kReady also while it is being replaced
  Fingerprint loaded = {};                          // kReady: of the model.pt that answers
  Fingerprint failed = {};   // with failures: of the model.pt that could not be loaded
  int failures = 0;          // of `failed`, one after the other; 0 once a load has succeeded
  TimePoint failed_at = {};  // the last of them
  bool dropped = false;      // a call asked for this version's unload
};

using VersionStates = std::map<Version, VersionStatus>;

// What to do next about a model.
struct Plan {
  std::optional<Version> load = {};  // the next to load, or to load again
  std::set<Version> retire = {};     // to be unloaded once their last call has been answered
  TimePoint again = kNever;          // when a failed load may be tried again

  bool operator==(const Plan&) const = default;
};

// How long after the `failures`-th failure in a row a load is tried again: 1, 2, 4, ... 60 s.
Duration load_backoff(int failures);

// `load` is the first, in the order of first_to_load, of the wanted and present versions that are
// not ready, or whose model.pt was replaced since. One whose load failed waits until its file
// changes or, with `retry`, until its back-off has passed. What is being loaded or unloaded is left
// alone. A version that is not wanted any more retires once every wanted one is ready, and a
// dropped one at once. Where nothing is wanted, what is loaded stays unless the model may have no
// version.
Plan plan_model(const Wanted& wanted, const std::map<Version, Fingerprint>& present,
                const VersionStates& states, bool retry, TimePoint now);

// Of the `ready` ones the version that requests without a version go to where calls are not shared:
// that of the label `stable`, else the highest that is not the shadow alone. Nothing: there is
// none.
std::optional<Version> answering_version(const Wanted& wanted, const std::set<Version>& ready);

// The wanted versions in the order in which they are loaded: the version that requests without a
// version go to (label `stable`), then the highest first.
std::vector<Version> first_to_load(const Wanted& wanted);

}  // namespace tessera
