// Runs one batch: merge, forward, split. A batch that fails is run again request by request,
// so that one bad request never fails its neighbours. A request whose parts were computed with
// different states of the weights is computed again by who has delivered the last one, all of it
// with one.
//
// Contract: an Executor is owned by one worker thread. execute blocks while the model
// computes, calls deliver or drop once for every part, and does not throw for what a model
// may throw.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "batching/commit_lock.h"
#include "batching/merger.h"
#include "batching/pending_request.h"
#include "common/clock.h"
#include "model/runner.h"
#include "package/schema.h"

namespace tessera {

// Told of what happens to batches; calls come from the worker's thread.
class ExecutionObserver {
 public:
  virtual ~ExecutionObserver() = default;
  // A forward pass succeeded and its scores were split in `split`.
  virtual void on_pass(const PassTimings& pass, Duration split) = 0;
  // Its scores, after they were delivered; of `samples` samples.
  virtual void on_scores(const Scores& scores, std::int64_t samples) = 0;
  // A batch of several parts failed; each is tried alone.
  virtual void on_retry(std::size_t parts, const std::string& error) = 0;
  // A part failed alone. Returns what its client is told.
  virtual Refusal on_failure(const std::exception& failure) = 0;
  // The parts of a request that is to be computed again, as when it was submitted.
  virtual std::vector<Part> cut_again(PendingRequest& request) = 0;
};

class Executor {
 public:
  // All references must outlive the executor. `commits` is held for every forward pass; null: the
  // weights never change.
  Executor(const InputSchema& schema, Session& session, const Clock& clock,
           ExecutionObserver& observer, CommitLock* commits = nullptr);

  void execute(std::span<const Part> parts);

  // Host memory held for the next batch.
  std::size_t buffer_bytes() const { return merger_.bytes() + session_.bytes(); }

 private:
  // Whether the caller holds the lock.
  enum class Inside { kNo, kYes };

  void execute(std::span<const Part> parts, Inside inside);
  // Scores of all parts, or throws what the model threw.
  void run(std::span<const Part> parts, Inside inside);
  void compute_again(PendingRequest& request);

  const InputSchema& schema_;
  Session& session_;
  const Clock& clock_;
  ExecutionObserver& observer_;
  Merger merger_;
  CommitLock* const commits_;
  std::vector<OutputView> views_;
  std::vector<PendingRequest*> mixed_;  // that are to be computed again
};

}  // namespace tessera
