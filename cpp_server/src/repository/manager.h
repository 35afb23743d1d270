// Whoever brings the versions of repositories in and out while requests are answered: one thread
// that reads folders, loads what is wanted, publishes it, and gives the memory of what is not
// wanted any more back once its last call has been answered. docs/repository.md has the rules; the
// decisions are pure functions (wanted.h, changes.h, routes.h).
//
// Threads: once the loads of the start have ended, packages are opened and memory is given back on
// threads that stand aside (pace.h), which the manager's own waits for; what a version serves with
// is started by the manager's, at the priority of any other. Nobody else waits for it: what others
// ask for is queued, and what they look at (the registry, the index) is published as a whole.
//
// Contract: start once; stop from the same thread, before the registry or anything else that was
// given ends. index, load_counts, load, unload, rescan and begin_stop may be called from any
// thread.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/published.h"
#include "follow/followed_version.h"
#include "follow/follower.h"
#include "follow/undo_records.h"
#include "metrics/model_list.h"
#include "model/loader.h"
#include "model/registry.h"
#include "repository/control.h"
#include "repository/live_model.h"
#include "server/config.h"
#include "server/log.h"

namespace tessera {

class RepositoryManager final : public RepositoryControl {
 public:
  // Reads, checks and opens the package at `path`. `progress` is to be called with the share that
  // is done, 0 to 1; what it throws ends the load. With `beside` others are served meanwhile.
  using Progress = std::function<void(double share)>;
  using Load =
      std::function<LoadedPackage(const std::string& path, const Progress& progress, bool beside)>;

  // Calls a loaded version of `model` with what clients ask for, before it answers them; null: none
  // is.
  using WarmUp = std::function<void(const std::string& model, ServedModel& version)>;

  // What the manager tells, from its thread.
  struct Listener {
    std::function<void(const std::string& model, bool serving)> serving;
    std::function<void(const std::string& model)> gone;  // there is no such model any more
    std::function<void()> started;                       // each load of the start has ended
    // What a version leaves whose last call has been answered, on a thread that stands aside; null:
    // it is destroyed.
    std::function<void(LoadedPackage)> left = nullptr;
  };

  // A model of --model, with the version in its manifest.
  using Fixed = std::pair<std::string, std::string>;

  // `config` and the references outlive the manager. Metrics of versions are added to `list`.
  RepositoryManager(const ServerConfig& config, std::vector<Fixed> fixed, Registry& registry,
                    ModelList& list, Load load, WarmUp warm_up, Listener listener,
                    const Clock& clock, const Log& log, FollowedVersion::Options follow = {});
  ~RepositoryManager() override;

  void start();

  // Reads the folders again, soon.
  void rescan();

  // Ends a load that is going on, soon, and answers calls with UNAVAILABLE. What is loaded goes on
  // answering.
  void begin_stop();

  // The same, and returns once the thread has ended; versions that were leaving have then answered.
  void stop();

  std::vector<IndexEntry> index() const override;
  ModelControl control() const override { return config_.control; }
  std::vector<LoadCount> load_counts() const override;
  void load(const std::string& model, const LoadRequest& request, Done done) override;
  void unload(const std::string& model, std::optional<Version> version, Done done) override;

 private:
  // Ends a load while the server stops.
  struct Stopped {};
  struct Call {
    std::string model;
    std::optional<LoadRequest> load;  // nothing: unload `version`
    std::optional<Version> version;
    Done done;
  };
  // A version that answers no further calls and is still answering some.
  struct Leaving {
    std::string name;
    Version version = 0;
    bool replaced = false;  // the same version has been loaded again
    std::int64_t bytes = 0;
    std::shared_ptr<ServedModel> model;
  };
  struct Shown {
    std::vector<IndexEntry> entries;
    std::vector<LoadCount> counts;
  };

  void run();
  void serve();
  void attempt(const std::function<void()>& work);
  void turn();
  void wait();
  void ask(Call call);
  void handle(const Call& call);
  Status carry_out(const Call& call);
  Status change(LiveModel& model, const Change& wish);
  LiveModel* find_model(const std::string& name);
  void read_folders();
  void read_model(LiveModel& model, ModelFolder found);
  void remark(const std::string& line);
  void work_off();
  bool work_on(LiveModel& model);
  std::shared_ptr<ServedModel> try_load(LiveModel& model, Version version);
  LoadedPackage load(const std::string& path, const Progress& progress);
  void check_room(const std::string& path, std::int64_t bytes) const;
  void note_failure(LiveModel& model, Version version, const std::string& reason);
  void start_following();
  void begin_to_follow(const LiveModel& model, Version version, ServedModel& served);
  void reload_if_it_must(const std::string& name, const std::string& version);
  void load_again(LiveModel& model, Version version);
  Status roll_back(LiveModel& model, Version version, CommitNumber commit);
  bool obey_fence(LiveModel& model, Version version, const Fence& fenced);
  void put_in_place(LiveModel& model, Version version, std::shared_ptr<ServedModel> served);
  void retire(LiveModel& model, Version version, bool replaced);
  void let_go();
  void wait_until_gone();
  void publish(LiveModel& model);
  void watch();
  void show();

  const ServerConfig& config_;
  const std::vector<Fixed> fixed_;
  Registry& registry_;
  ModelList& list_;
  const Load load_;
  const WarmUp warm_up_;
  const Listener listener_;
  const Clock& clock_;
  const Log& log_;
  const FollowedVersion::Options follow_options_;
  UndoRecords undo_;
  std::unique_ptr<Follower> follower_;  // null: without --follow

  // The manager's thread's alone:
  std::map<std::string, std::unique_ptr<LiveModel>> models_;
  std::map<std::string, LoadCount> counts_;
  std::vector<Leaving> leaving_;
  std::set<std::string> remarks_;  // that have been logged
  TimePoint again_ = kNever;       // when a failed load may be tried again
  TimePoint next_read_ = kNever;

  Published<Shown> shown_;
  std::atomic<double> progress_ = 0;  // of the load that is going on
  std::atomic<bool> started_ = false;
  std::atomic<bool> stopping_ = false;
  Mutex mutex_;
  Condition changed_;
  std::deque<Call> calls_ TESSERA_GUARDED_BY(mutex_);
  // Versions whose state cannot be had without loading them again, by model and version.
  std::set<std::pair<std::string, std::string>> reloads_ TESSERA_GUARDED_BY(mutex_);
  bool rescan_ TESSERA_GUARDED_BY(mutex_) = false;
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tessera
