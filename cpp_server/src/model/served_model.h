// One version of a model that answers: its decoder, its queue, its workers and its counters.
//
// Short passes of a model on CPUs are run by the event loop that brings their requests, at the end
// of its turn; others by workers. So a loop keeps what it brings as long as that would be a short
// pass, and gives it to the queue otherwise. Loops share nothing but the queue: on a host with
// many CPUs, requests that each take the queue's lock spend more on it than on the network.
//
// Contract: construction opens a session per worker and event loop, which may take long, and starts
// the workers; throws UsageError where the system gives no thread for one. submit may be called
// from any thread and does not block; an event loop that says which one it is calls end_turn behind
// the last submit of a turn, which blocks for no longer than a short pass. drain, then close; close
// blocks until the workers have finished what is queued, and what comes later is refused. The
// destructor closes, so it must not run on a worker, and gives the model's memory back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "batching/batch_scheduler.h"
#include "batching/commit_lock.h"
#include "batching/executor.h"
#include "follow/followed_version.h"
#include "metrics/model_metrics.h"
#include "model/loader.h"
#include "request/decoder.h"
#include "request/infer_decoder.h"
#include "request/request_bytes.h"
#include "server/config.h"
#include "server/log.h"

namespace tessera {

class ServedModel final : private ExecutionObserver {
 public:
  // `clock` and `log` must outlive the model. Of `config` it takes the limits and the workers.
  ServedModel(LoadedPackage package, const ServerConfig& config,
              std::shared_ptr<ModelMetrics> metrics, const Clock& clock, const Log& log);
  ~ServedModel() override;
  ServedModel(const ServedModel&) = delete;
  ServedModel& operator=(const ServedModel&) = delete;

  const std::string& name() const { return metrics_->model; }
  const std::string& version() const { return metrics_->version; }
  const RequestDecoder& decoder() const { return decoder_; }
  const InferDecoder& infer_decoder() const { return infer_decoder_; }
  const Manifest& manifest() const { return package_.manifest; }
  const WorkerPlan& plan() const { return plan_; }
  const std::string& path() const { return package_.path; }
  std::vector<std::string> devices() const { return package_.runner->devices(); }
  const BatchLimits& batch_limits() const { return scheduler_.batch_limits(); }
  const QueueLimits& queue_limits() const { return queue_limits_; }
  ModelMetrics& metrics() const { return *metrics_; }

  // The hash of the package's file; empty until it is known.
  std::string sha256() const { return package_.file_hash->known(); }

  // What its requests take of the byte budget.
  const RequestBytes& request_bytes() const { return request_bytes_; }

  // Takes responsibility for a decoded request: it will be answered or failed, perhaps before
  // this returns. Throws std::bad_alloc, and the request is still the caller's then.
  static constexpr std::size_t kNoLoop = SIZE_MAX;
  void submit(PendingRequest& request, std::size_t loop = kNoLoop);

  // The same for several requests, with one turn at the queue; takes responsibility for all of them
  // and throws nothing.
  void submit(std::span<PendingRequest* const> requests);

  // Runs the pass of what the loop has brought and not given to the queue, if it is short, and
  // gives it to the queue otherwise.
  void end_turn(std::size_t loop);

  // Logs the SHA-256 of the package's file, or why it cannot be had, once that is known.
  void log_file_hash() const;

  // What each of its batches holds; null: its weights never change.
  CommitLock* commit_lock() const { return commit_lock_.get(); }
  Runner& runner() const { return *package_.runner; }
  const std::string& base_sha256() const { return package_.base_sha256; }

  // What follows the version's log, from before the first call that it answers; null: nothing does.
  void follow(std::unique_ptr<FollowedVersion> version) { followed_ = std::move(version); }
  FollowedVersion* followed() const { return followed_.get(); }

  // From now on batches do not wait for more requests.
  void drain() { scheduler_.drain(); }
  void close();

  // Closes, and gives the package away; then nothing but the destructor may be called.
  LoadedPackage give_up();

 private:
  // Who computes batches: a worker, or an event loop.
  struct Computer {
    Computer(ServedModel& model, Session& its_session);

    Session& session;
    Executor executor;
    CutBatch batch;
    std::size_t counted_bytes = 0;
    bool begun = false;  // its thread has told the session
  };

  // What an event loop has brought in its turn and neither computed nor given to the queue.
  struct Turn {
    std::vector<Part> parts;
    std::int64_t samples = 0;
    std::int64_t ids = 0;
    bool shared_rows = false;

    void clear();
  };
  struct Loop {
    Loop(ServedModel& model, Session& its_session) : computer(model, its_session) {}

    Computer computer;
    Turn turn;
  };

  void start_workers();
  // Notes when the request came; false: it was late, and has been dropped.
  static bool arrives(PendingRequest& request, TimePoint now);
  // Appends the request's parts. Throws std::bad_alloc, and has appended none then.
  void cut(PendingRequest& request, std::vector<Part>& parts) const;
  // What becomes of a thread that brings requests while another is at the queue.
  enum class AtTheQueue {
    kAreWaitedFor,
    kGoFirst,  // it keeps what it brings
  };
  // Lets the parts of requests wait for a worker, or drops their requests. False: others go first,
  // and nothing was done.
  bool queue(std::span<Part> parts, AtTheQueue others = AtTheQueue::kAreWaitedFor) noexcept;
  void drop_refused(std::vector<RefusedRequest>& refused) noexcept;
  // Whether the loop shall run the pass of its turn's requests.
  bool runs_here(const Turn& turn) const;
  // Moves the turn's parts to what the loop's computer computes or drops.
  void cut(Turn& turn, CutBatch& batch) const;
  void work(WorkerKind kind, Session& session, ModelMetrics::DeviceCounters& device);
  // The batch that was cut.
  void compute(Computer& computer, ModelMetrics::DeviceCounters& device);
  void on_pass(const PassTimings& pass, Duration split) override;
  void on_scores(const Scores& scores, std::int64_t samples) override;
  void on_retry(std::size_t parts, const std::string& error) override;
  Refusal on_failure(const std::exception& failure) override;
  std::vector<Part> cut_again(PendingRequest& request) override;

  LoadedPackage package_;
  const std::shared_ptr<ModelMetrics> metrics_;
  const std::shared_ptr<ModelMetrics::Loaded> shown_;
  const Clock& clock_;
  const Log& log_;
  const int threads_per_worker_;
  const int niceness_;
  const RequestDecoder decoder_;
  const InferDecoder infer_decoder_;
  const RequestBytes request_bytes_;
  const WorkerPlan plan_;
  const QueueLimits queue_limits_;
  const std::unique_ptr<CommitLock> commit_lock_;  // null: its weights never change
  BatchScheduler scheduler_;
  std::vector<std::unique_ptr<Session>> sessions_;  // one per worker, then one per event loop
  std::vector<std::unique_ptr<Loop>> loops_;        // none where the model is on GPUs
  std::vector<std::jthread> workers_;
  std::unique_ptr<FollowedVersion> followed_;
};

// A fresh id for a bug, under which the log has what the client is not told.
std::string new_error_id();

}  // namespace tessera
