// What a call about a repository would change: pure functions of a model's folder, settings, record
// and states, and of the call. docs/repository.md says what each call does.
//
// Contract: no state, any thread, nothing blocks.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "common/status.h"
#include "repository/control.h"
#include "repository/wanted.h"

namespace tessera {

struct ModelSituation {
  std::string model = {};
  std::set<Version> present = {};
  ServingConfig config = {};
  ControlRecord record = {};
  VersionStates states = {};
};

struct Change {
  Status status = {};                // the rest is meaningful where it is OK
  ControlRecord record = {};         // to be written once `load` are ready
  std::set<Version> load = {};       // have to be ready before the call is done
  std::optional<Version> drop = {};  // to be unloaded then, whatever else is wanted
};

// RepositoryModelLoad. NOT_FOUND: a version that is not in the folder. INVALID_ARGUMENT: parameters
// that do not go together. FAILED_PRECONDITION: a rollback that leads nowhere.
Change change_by_load(const ModelSituation& situation, const LoadRequest& request);

// RepositoryModelUnload of `version`, or of the whole model. NOT_FOUND: a version that is neither
// in the folder nor loaded. FAILED_PRECONDITION: a label or the shadow names it.
Change change_by_unload(const ModelSituation& situation, std::optional<Version> version);

}  // namespace tessera
