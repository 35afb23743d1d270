// A version whose weights follow the log of commits beside its package: reads and checks what comes
// next, stages it beside serving, writes it between two batches, and takes back what was fenced
// off.
//
// A commit is written whole or not at all: while no batch is computed the new bytes are
// exchanged for the old ones, the golden answers are computed, and where they are not those of the
// commit the bytes are exchanged back. What was replaced is kept for as long as --rollback-bytes
// lets it. Whatever may fail, for want of memory above all, comes before the bytes change.
//
// Contract: any thread; one call runs at a time, and a commit that is being read is left for later
// where another call comes, as its caller may want to take others back.
// They block on the disk and on batches that are being computed. Files are read and checked on a
// thread that runs while CPUs have nothing else to do, or stands back for others where they always
// have; the bytes are written by the calling thread, which must not:
// batches wait for it. Ends before the model.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "batching/commit_lock.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "follow/commit_chain.h"
#include "follow/commit_file.h"
#include "follow/log_listing.h"
#include "follow/undo_records.h"
#include "metrics/follow_metrics.h"
#include "model/golden.h"
#include "model/runner.h"
#include "package/signature.h"
#include "repository/folder.h"
#include "server/log.h"

namespace tessera {

class FollowedVersion {
 public:
  struct Options {
    std::optional<std::vector<PublicKey>> trusted = {};  // nothing: signatures are not looked at
    bool verify_golden = true;
    // Asked while a commit is read; true: it is left for later. Null: none is.
    std::function<bool()> stopping = nullptr;
    // Whether a commit may be staged on a thread that runs while CPUs have nothing else to do.
    // Null: where they had nothing to do lately.
    bool (*idle_thread_gets_on)() = nullptr;
  };
  // What it changes; all of it outlives the version.
  struct Model {
    const InputSchema& schema;
    Runner& runner;  // has weights
    CommitLock& commits;
    FollowMetrics& metrics;
  };

  // `state` is that of the package alone, `log_folder` where its commits come.
  FollowedVersion(LogState state, std::string log_folder, const Model& model, Options options,
                  UndoRecords& undo, const Clock& clock, const Log& log);
  ~FollowedVersion();
  FollowedVersion(const FollowedVersion&) = delete;
  FollowedVersion& operator=(const FollowedVersion&) = delete;

  enum class Outcome {
    kIdle,     // nothing new, or what is there is refused, or left for later
    kChanged,  // one step: there may be more
    kReload,   // what was replaced is not held any more: the version has to be loaded again
  };

  // The next step.
  Outcome poll();

  // Whether a commit that it has taken was fenced off, and what that replaced is not held any more.
  bool must_reload() const;

  struct State {
    CommitNumber number = 0;
    std::map<CommitNumber, std::string> applied = {};  // their hashes
  };
  State state() const;

  // Whether the metrics show its state: from when it answers until another takes its place.
  void set_shown(bool shown);

  const std::string& log_folder() const { return log_folder_; }

 private:
  struct Applied {
    CommitNumber number = 0;
    std::string sha256;
    std::optional<double> newest_example_s;
    std::weak_ptr<StagedPatches> replaced;
  };
  // A commit that is ready to be written.
  struct Staged {
    ReadCommit commit;
    std::shared_ptr<StagedPatches> patches;
    std::optional<GoldenAnswers> golden;
  };
  // What has been refused, so that it is told once.
  struct Refused {
    CommitNumber number = 0;
    std::string reason;
    Fingerprint file;
    bool again = false;  // the same file may be taken at another time
    TimePoint when{};
  };
  // What is to be written back, the newest first; nothing: not all of it is held.
  using Undo = std::optional<std::vector<std::shared_ptr<StagedPatches>>>;
  // Ends the reading of a commit that is left for later.
  struct LeftForLater {};
  // Ends the reading on a thread that has too little of a CPU.
  struct Starved {};
  // Waits for its turn before a commit that is being read.
  class Urgent;

  Outcome step() TESSERA_REQUIRES(mutex_);
  Step next(const Fence& fence, const std::set<CommitNumber>& numbers) const
      TESSERA_REQUIRES(mutex_);
  Undo undo_to(CommitNumber to) const TESSERA_REQUIRES(mutex_);
  Outcome take(CommitNumber number, const Fence& fence) TESSERA_REQUIRES(mutex_);
  Outcome go_back(CommitNumber to) TESSERA_REQUIRES(mutex_);
  Staged stage_aside(CommitNumber number, const Fence& fence) const TESSERA_REQUIRES(mutex_);
  Staged stage(CommitNumber number, const Fence& fence, const std::stop_token& starved) const
      TESSERA_REQUIRES(mutex_);
  void go_on(const std::stop_token& starved) const;
  // How long nothing else was computed.
  Duration write(Staged& staged) TESSERA_REQUIRES(mutex_);
  void replay(const Staged& staged);
  // What a commit that stands has left to do, beside serving, for so long with pauses.
  void finish(StagedPatches& patches, Duration pauses);
  void refuse(CommitNumber number, const CommitRefusal& refusal, const Fingerprint& file,
              bool again = false) TESSERA_REQUIRES(mutex_);
  bool refused_before(CommitNumber number, const Fingerprint& file) const TESSERA_REQUIRES(mutex_);
  LogState log_state() const TESSERA_REQUIRES(mutex_);
  // What stands now, without anything refused.
  void settle() TESSERA_REQUIRES(mutex_);
  void show() TESSERA_REQUIRES(mutex_);

  const LogState base_;
  const std::string log_folder_;
  const Model model_;
  const Options options_;
  UndoRecords& undo_;
  const Clock& clock_;
  const Log& log_;
  const std::unique_ptr<Session> session_;  // for golden answers

  mutable std::atomic<int> urgent_ = 0;  // calls that wait for their turn
  mutable Mutex mutex_;
  LogListing listing_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Applied> applied_ TESSERA_GUARDED_BY(mutex_);
  std::optional<Refused> refused_ TESSERA_GUARDED_BY(mutex_);
  std::string trouble_ TESSERA_GUARDED_BY(mutex_);
  bool shown_ TESSERA_GUARDED_BY(mutex_) = false;
  TimePoint reload_asked_ TESSERA_GUARDED_BY(mutex_) = TimePoint::min();
};
}  // namespace tessera
