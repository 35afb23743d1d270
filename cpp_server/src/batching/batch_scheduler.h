// The batch scheduler of one model: requests wait here and workers take batches, the one place
// where the front end's threads and the workers meet.
//
// The queue, the policy's view of it and the cost model are behind one mutex that is held for
// a push or a cut and for nothing else: no request is answered, no metric's lock is taken and
// nothing is computed under it. Who brings several requests brings them at once, under one hold of
// it. A thread of its own between the two would cost every request
// two more context switches.
//
// Where several event loops submit, a loop that finds the mutex taken keeps what it brings
// (ServedModel) and brings it with what comes next.
//
// Contract: every method may be called from any thread. submit, try_submit, outlook, observe and
// drain do not block (beyond the mutex); next blocks until there is a batch. Dropped parts are
// handed to the caller, who drops their requests.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "batching/cost_model.h"
#include "batching/pending_request.h"
#include "batching/policy.h"
#include "batching/request_queue.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace tessera {

struct CutBatch {
  std::vector<Part> parts;
  std::vector<DroppedPart> dropped;
  CutReason reason = CutReason::kIdle;
};

// A request that was not taken, the parts that it was cut into, and why: the queue is full
// (RESOURCE_EXHAUSTED) or closed (UNAVAILABLE), or there is no memory for it (RESOURCE_EXHAUSTED).
struct RefusedRequest {
  PendingRequest* request = nullptr;
  std::size_t parts = 0;
  Status status;
};

struct QueueDepth {
  std::int64_t requests = 0;
  std::int64_t samples = 0;
};

// What can be known without the mutex, a moment old.
struct Outlook {
  int free_workers = 0;  // ordinary ones that wait and that nobody has woken
  PassCost work;         // of passes lately, of a CPU
  bool ending = false;   // draining or closed
};

class BatchScheduler {
 public:
  // `clock` must outlive the queue.
  BatchScheduler(QueueLimits queue_limits, BatchLimits batch_limits, const Clock& clock)
      : queue_limits_(queue_limits),
        batch_limits_(batch_limits),
        clock_(clock),
        queue_(queue_limits) {}

  const BatchLimits& batch_limits() const { return batch_limits_; }

  // Lets requests' parts wait, in their order, and takes responsibility for them, but for those
  // that are appended to `refused`, which are still the caller's. `parts` has each request's parts
  // side by side and is the caller's to reuse. Throws std::bad_alloc, and has taken none then.
  void submit(std::span<Part> parts, std::vector<DroppedPart>& dropped,
              std::vector<RefusedRequest>& refused);

  // The same, but false and nothing was done where another thread holds the mutex.
  bool try_submit(std::span<Part> parts, std::vector<DroppedPart>& dropped,
                  std::vector<RefusedRequest>& refused);

  // The same as submit for one request; what is not OK is why it was refused.
  Status submit(std::vector<Part> parts, std::vector<DroppedPart>& dropped);

  // For a thread that may run the pass of what it brings itself (`runs_here`).
  Outlook outlook() const;

  // Fills `batch`, whose memory is reused, with at least one part to compute or to drop, for a
  // worker of kind `kind`. False: the queue is closed, and empty or not worth a spare worker.
  bool next(WorkerKind kind, CutBatch& batch);

  // What a pass took of time and of its thread's CPU, for the policy's estimates. Not taken where
  // another thread holds the mutex: there are more passes to learn from.
  void observe(std::int64_t samples, Duration took, Duration cpu);

  // From now on batches are cut without waiting for more requests.
  void drain();

  // Wakes every worker; next returns false once nothing is queued.
  void close();

  QueueDepth depth() const;

 private:
  // Workers of one kind that wait.
  struct Idle {
    Condition changed;
    int count = 0;
    // Those of them that were notified and have not run since. One that was not may run first and
    // be taken for it; then one more is woken than needed, never one less.
    int waking = 0;

    // Whether one is to be woken for what is queued. While one is on its way it takes what comes
    // meanwhile, and wakes the next one for what it leaves; waking a worker for each of the small
    // requests that come within that time costs more than their passes. For heavy work all are
    // woken at once.
    bool wakes(bool heavy) const { return count > waking && (waking == 0 || heavy); }
  };

  // submit, under the mutex. Gives the condition that the caller notifies once it has released the
  // mutex; null: no worker is to be woken.
  Condition* take(std::span<Part> parts, std::vector<DroppedPart>& dropped,
                  std::vector<RefusedRequest>& refused) TESSERA_REQUIRES(mutex_);
  // Shows in the outlook whether workers are free, and whether the end has come.
  void show() TESSERA_REQUIRES(mutex_);
  // One request's parts; what is not OK is why they were not taken.
  Status push(std::span<Part> parts, TimePoint now, std::vector<DroppedPart>& dropped)
      TESSERA_REQUIRES(mutex_);
  Idle& idle(WorkerKind kind) TESSERA_REQUIRES(mutex_) {
    return kind == WorkerKind::kSpare ? idle_spares_ : idle_workers_;
  }
  QueueState state(WorkerKind asks) const TESSERA_REQUIRES(mutex_);
  // Moves parts from the queue to `batch`.
  void cut(std::int64_t max_samples, CutReason reason, TimePoint now, CutBatch& batch)
      TESSERA_REQUIRES(mutex_);
  // Whom to wake for what is queued, which the caller does; null: nobody. A condition may be
  // notified without the mutex.
  Condition* worker_to_wake() TESSERA_REQUIRES(mutex_);

  const QueueLimits queue_limits_;
  const BatchLimits batch_limits_;
  const Clock& clock_;
  mutable Mutex mutex_;
  RequestQueue queue_ TESSERA_GUARDED_BY(mutex_);
  CostModel time_ TESSERA_GUARDED_BY(mutex_);
  CostModel work_ TESSERA_GUARDED_BY(mutex_);
  Idle idle_workers_ TESSERA_GUARDED_BY(mutex_);
  Idle idle_spares_ TESSERA_GUARDED_BY(mutex_);
  bool draining_ TESSERA_GUARDED_BY(mutex_) = false;
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;

  // The outlook: written under the mutex, in a cache line that nothing else is in.
  struct alignas(64) Shown {
    std::atomic<int> free_workers = 0;
    std::atomic<bool> ending = false;
    std::atomic<float> fixed_seconds = 0;
    std::atomic<float> per_sample_seconds = 0;
  };
  Shown shown_;
};

}  // namespace tessera
