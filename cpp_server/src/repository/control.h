// What the calls about a repository (KServe's, and the same over HTTP) ask of whoever runs it.
//
// Contract of RepositoryControl: any thread; nothing blocks. load and unload call `done` once, from
// any thread, perhaps before they return; with the status of the outcome. Whoever implements it
// calls every `done` before it ends, with UNAVAILABLE where the server drains. Calls are carried
// out one after the other; one that comes while kMaxWaitingCalls wait is RESOURCE_EXHAUSTED.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/enums.h"
#include "common/status.h"
#include "repository/version.h"

namespace tessera {

// When the versions of repositories change: --model-control.
enum class ModelControl { kNone, kPoll, kExplicit };

std::string_view control_name(ModelControl control);  // "none", "poll", "explicit"

// KServe's states of a model in a repository.
enum class VersionState { kUnavailable, kLoading, kReady, kUnloading };
inline constexpr auto kVersionStates = enum_size<VersionState::kUnloading>();

std::string_view state_name(VersionState state);  // "UNAVAILABLE", "LOADING", ...

// One version of one model. A model without any version has one entry without a version.
struct IndexEntry {
  std::string model = {};
  std::string version = {};  // decimal, or what the manifest of a package of --model says
  VersionState state = VersionState::kUnavailable;
  // Why it is UNAVAILABLE; of a READY version whose log is followed, why no further.
  std::string reason = {};
  std::optional<std::int64_t> commit = {};  // of a followed version: that of its state
  double progress = 0;                      // 0 to 1 while it is LOADING
  std::vector<std::string> labels = {};     // that name it
  double percent = 0;                       // of the requests without a version, by `traffic`
  bool shadow = false;                      // whether it computes a share of the calls, too
};

// Going back: to a version, to the state of a version after one of its commits (0: the package
// itself), or to the highest version below the one that answers.
struct Rollback {
  std::optional<Version> version = {};
  std::optional<std::int64_t> commit = {};  // only with a version
};

// RepositoryModelLoad's parameters. With nothing set the folder is read again.
struct LoadRequest {
  std::optional<Version> version = {};
  std::string label = {};                 // only with a version
  std::optional<Rollback> rollback = {};  // with nothing else
};

// Loads of a model by how they ended: tessera_model_loads_total.
struct LoadCount {
  std::string model = {};
  std::uint64_t ok = 0;
  std::uint64_t failed = 0;
};

inline constexpr std::size_t kMaxWaitingCalls = 64;

class RepositoryControl {
 public:
  using Done = std::function<void(const Status& outcome)>;

  virtual ~RepositoryControl() = default;

  // Every model and version, those of --model as well, in the order of names and numbers.
  virtual std::vector<IndexEntry> index() const = 0;

  // How often versions of each model of a repository were loaded, in the order of names.
  virtual std::vector<LoadCount> load_counts() const = 0;

  // Whether load and unload are heard at all: with --model-control explicit. They answer
  // FAILED_PRECONDITION otherwise.
  virtual ModelControl control() const = 0;

  virtual void load(const std::string& model, const LoadRequest& request, Done done) = 0;
  virtual void unload(const std::string& model, std::optional<Version> version, Done done) = 0;
};

}  // namespace tessera
