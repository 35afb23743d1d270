#include "model/served_model.h"

#include <sys/resource.h>
#include <unistd.h>

#include <new>
#include <random>
#include <system_error>
#include <utility>

#include "common/cpus.h"
#include "common/out_of_memory.h"
#include "common/text.h"
#include "common/thread_name.h"

namespace tessera {
namespace {

BatchLimits shared(BatchLimits limits, const WorkerPlan& plan) {
  if (plan.spare > 0) limits.sharers = plan.ordinary + plan.spare;
  return limits;
}

Refusal refusal_of(RejectReason reason) {
  if (reason == RejectReason::kDeadline) {
    return {{Code::kDeadlineExceeded, "the deadline passed while the request waited for a worker"},
            reason};
  }
  return {{Code::kCancelled, "the client cancelled the request"}, reason};
}

// Not by an exception: the requests are nobody's but ours.
void drop_all(std::vector<DroppedPart>& dropped) noexcept {
  for (const DroppedPart& part : dropped) part.part.request->drop(refusal_of(part.reason));
  dropped.clear();
}

// Parts that a loop keeps at most while others are at the queue.
constexpr std::size_t kMostKept = 64;

// Makes the calling thread wait behind others of this process for a CPU: a batch that begins a
// little later grows, but a call that is read later loses its time.
void stand_back(int niceness) {
  if (niceness == 0) return;
  const auto thread = static_cast<id_t>(::gettid());
  const int own = ::getpriority(PRIO_PROCESS, thread);
  // Standing back needs no privilege; where it is refused the thread runs as it is.
  ::setpriority(PRIO_PROCESS, thread, own + niceness);
}

}  // namespace

std::string new_error_id() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  constexpr char kDigits[] = "0123456789abcdef";
  std::string id;
  std::uint64_t bits = generator();
  for (int i = 0; i < 12; ++i, bits >>= 4) id += kDigits[bits & 15];
  return id;
}

ServedModel::ServedModel(LoadedPackage package, const ServerConfig& config,
                         std::shared_ptr<ModelMetrics> metrics, const Clock& clock, const Log& log)
    : package_(std::move(package)),
      metrics_(std::move(metrics)),
      shown_(std::make_shared<ModelMetrics::Loaded>()),
      clock_(clock),
      log_(log),
      threads_per_worker_(config.threads_per_worker),
      niceness_(config.worker_niceness),
      decoder_(package_.manifest.schema, config.request_limits, package_.runner->shares_rows()),
      infer_decoder_(package_.manifest.schema, config.request_limits),
      request_bytes_(package_.manifest.schema),
      plan_(plan_workers(config, package_.manifest.device == "cpu", available_cpus())),
      queue_limits_(config.queue_limits),
      commit_lock_(package_.runner->weights() == nullptr ? nullptr
                                                         : std::make_unique<CommitLock>()),
      scheduler_(config.queue_limits, shared(config.batch_limits, plan_), clock) {
  const Manifest& manifest = package_.manifest;
  shown_->facts = {.sha256 = [this] { return sha256(); },
                   .torch = manifest.torch_version,
                   .dtype = manifest.dtype,
                   .device = manifest.device,
                   .load_seconds = seconds(package_.load_time)};
  shown_->features =
      std::make_unique<FeatureCounter>(manifest.schema, package_.runner->vocabularies());
  shown_->ranges = std::make_unique<RangeHistograms>(manifest.schema);
  shown_->scores = std::make_unique<ScoreCounter>(manifest.schema.outputs);
  shown_->gauges = {.queue_requests = [this] { return scheduler_.depth().requests; },
                    .queue_samples = [this] { return scheduler_.depth().samples; },
                    .memory = [this] { return package_.runner->memory(); }};
  for (const std::string& device : devices()) shown_->devices.emplace_back(device);
  start_workers();
  metrics_->set_loaded(shown_);
}

void ServedModel::start_workers() {
  // Workers take turns in devices, so that each has its share of them. On a GPU two of them are
  // what lets one batch's copies overlap another's forward.
  const std::size_t devices = shown_->devices.size();
  const std::size_t ordinary = devices * static_cast<std::size_t>(plan_.ordinary);
  for (std::size_t i = 0; i < ordinary + static_cast<std::size_t>(plan_.spare); ++i) {
    sessions_.push_back(package_.runner->open_session(i % devices));
    if (i < devices && !sessions_.back()->remark().empty()) {
      log_.warning("session", {{"model", name()},
                               {"device", shown_->devices[i].name},
                               {"remark", sessions_.back()->remark()}});
    }
  }
  const std::size_t workers = sessions_.size();
  if (package_.manifest.device == "cpu") {
    for (int loop = 0; loop < default_workers(); ++loop) {
      sessions_.push_back(package_.runner->open_session(0));
      loops_.push_back(std::make_unique<Loop>(*this, *sessions_.back()));
    }
  }
  try {
    for (std::size_t i = 0; i < workers; ++i) {
      const WorkerKind kind = i < ordinary ? WorkerKind::kOrdinary : WorkerKind::kSpare;
      workers_.emplace_back([this, i, kind, devices] {
        name_thread("worker", i);
        work(kind, *sessions_[i], shown_->devices[i % devices]);
      });
    }
  } catch (const std::system_error& error) {
    const std::size_t started = workers_.size();
    close();  // those that have started wait for requests
    throw UsageError(text("no more than ", started, " of ", workers, " workers could be started (",
                          error.code().message(),
                          "); give fewer with --workers, or let the process have more threads"));
  } catch (const std::bad_alloc&) {
    close();  // likewise
    throw;
  }
}

ServedModel::~ServedModel() {
  metrics_->clear_loaded(*shown_);
  close();
}

void ServedModel::log_file_hash() const {
  // By value, for the model's other members may end before its package's hash does.
  package_.file_hash->tell([&log = log_, model = name(),
                            version = version()](const FileHash::Result& result) {
    if (!result.sha256.empty()) {
      log.info("file_hash", {{"model", model}, {"version", version}, {"sha256", result.sha256}});
    } else {
      log.warning("file_hash_failed",
                  {{"model", model}, {"version", version}, {"error", result.failure}});
    }
  });
}

void ServedModel::close() {
  scheduler_.close();
  workers_.clear();  // joins
  followed_.reset();
}

LoadedPackage ServedModel::give_up() {
  metrics_->clear_loaded(*shown_);
  close();
  loops_.clear();
  sessions_.clear();
  return std::move(package_);
}

bool ServedModel::arrives(PendingRequest& request, TimePoint now) {
  request.arrival = now;
  if (now < request.deadline) return true;
  request.expect_parts(1, 0);
  request.drop({{Code::kDeadlineExceeded, "the deadline passed before the request was queued"},
                RejectReason::kDeadline});
  return false;
}

void ServedModel::submit(PendingRequest& request, std::size_t loop) {
  if (!arrives(request, clock_.now())) return;
  if (loop >= loops_.size()) {
    std::vector<Part> parts = cut_again(request);
    queue(parts);
    return;
  }
  Turn& turn = loops_[loop]->turn;
  cut(request, turn.parts);
  turn.samples += request.request.samples;
  turn.ids += request.request.ids;
  turn.shared_rows = turn.shared_rows || request.request.shared.any();
  if (runs_here(turn)) return;
  const AtTheQueue others =
      turn.parts.size() < kMostKept ? AtTheQueue::kGoFirst : AtTheQueue::kAreWaitedFor;
  if (!queue(turn.parts, others)) return;
  turn.clear();
}

void ServedModel::submit(std::span<PendingRequest* const> requests) {
  std::vector<Part> parts;
  const TimePoint now = clock_.now();
  for (PendingRequest* const request : requests) {
    if (!arrives(*request, now)) continue;
    try {
      cut(*request, parts);
    } catch (const std::bad_alloc&) {
      request->expect_parts(1, 0);
      request->drop(out_of_memory_refusal());
    }
  }
  queue(parts);
}

namespace {

// Requests for whose place in a list there is no memory.
void refuse_all(std::span<const Part> parts) noexcept {
  for (const Part& part : parts) {
    if (!part.last) continue;
    part.request->expect_parts(1, 0);
    part.request->drop(out_of_memory_refusal());
  }
}

}  // namespace

bool ServedModel::queue(std::span<Part> parts, AtTheQueue others) noexcept {
  std::vector<DroppedPart> dropped;
  std::vector<RefusedRequest> refused;
  try {
    if (others == AtTheQueue::kAreWaitedFor) {
      scheduler_.submit(parts, dropped, refused);
    } else if (!scheduler_.try_submit(parts, dropped, refused)) {
      return false;
    }
  } catch (const std::bad_alloc&) {
    refuse_all(parts);
  }
  drop_all(dropped);
  drop_refused(refused);
  return true;
}

void ServedModel::drop_refused(std::vector<RefusedRequest>& refused) noexcept {
  for (RefusedRequest& one : refused) {
    const RejectReason reason =
        one.status.code == Code::kUnavailable ? RejectReason::kDraining : RejectReason::kQueueFull;
    const Refusal refusal{std::move(one.status), reason};
    for (std::size_t i = 0; i < one.parts; ++i) one.request->drop(refusal);
  }
}

void ServedModel::Turn::clear() {
  parts.clear();
  samples = 0;
  ids = 0;
  shared_rows = false;
}

bool ServedModel::runs_here(const Turn& turn) const {
  const Outlook outlook = scheduler_.outlook();
  return tessera::runs_here({.parts = static_cast<std::int64_t>(turn.parts.size()),
                             .samples = turn.samples,
                             .ids = turn.ids,
                             .shared_rows = turn.shared_rows,
                             .work = outlook.work,
                             .draining = outlook.ending,
                             .free_workers = outlook.free_workers},
                            scheduler_.batch_limits());
}

// Where there is no memory for the lists, the parts stay: they are then the queue's.
void ServedModel::cut(Turn& turn, CutBatch& batch) const {
  batch.parts.clear();
  batch.dropped.clear();
  batch.reason = CutReason::kIdle;
  batch.parts.reserve(turn.parts.size());
  batch.dropped.reserve(turn.parts.size());
  const TimePoint now = clock_.now();
  for (Part& part : turn.parts) {
    const auto reason = drop_reason(part, now);
    if (reason.has_value()) {
      batch.dropped.push_back({std::move(part), *reason});
    } else {
      batch.parts.push_back(std::move(part));
    }
  }
  turn.clear();
}

void ServedModel::cut(PendingRequest& request, std::vector<Part>& parts) const {
  const BatchLimits& limits = scheduler_.batch_limits();
  cut_request(request, package_.manifest.schema.outputs.size(), limits.max_samples, limits.max_ids,
              parts);
}

std::vector<Part> ServedModel::cut_again(PendingRequest& request) {
  std::vector<Part> parts;
  cut(request, parts);
  return parts;
}

ServedModel::Computer::Computer(ServedModel& model, Session& its_session)
    : session(its_session),
      executor(model.package_.manifest.schema, its_session, model.clock_, model,
               model.commit_lock_.get()) {}

void ServedModel::work(WorkerKind kind, Session& session, ModelMetrics::DeviceCounters& device) {
  stand_back(niceness_);
  session.begin_thread(threads_per_worker_);
  Computer computer(*this, session);
  while (scheduler_.next(kind, computer.batch)) compute(computer, device);
}

void ServedModel::end_turn(std::size_t loop) {
  if (loop >= loops_.size()) return;
  Turn& turn = loops_[loop]->turn;
  if (turn.parts.empty()) return;
  Computer& computer = loops_[loop]->computer;
  try {
    if (runs_here(turn)) cut(turn, computer.batch);
  } catch (const std::bad_alloc&) {  // the parts are still the turn's
  }
  if (!turn.parts.empty()) {
    queue(turn.parts);
    turn.clear();
    return;
  }
  if (!computer.begun) computer.session.begin_thread(threads_per_worker_);
  computer.begun = true;
  compute(computer, shown_->devices.front());
}

void ServedModel::compute(Computer& computer, ModelMetrics::DeviceCounters& device) {
  CutBatch& batch = computer.batch;
  drop_all(batch.dropped);
  if (batch.parts.empty()) return;
  metrics_->count_batch(batch.reason);
  device.inflight_batches.fetch_add(1, std::memory_order_relaxed);
  const TimePoint now = clock_.now();
  // Before the batch runs: afterwards the requests are no longer ours to look at.
  for (const Part& part : batch.parts) {
    metrics_->observe_stage(Stage::kQueue, seconds(now - part.request->arrival));
    if (part.index == 0) {
      shown_->features->count(part.request->request);
      if (const auto outside = part.request->request.out_of_range_ids; outside > 0) {
        metrics_->out_of_range_ids.fetch_add(static_cast<std::uint64_t>(outside),
                                             std::memory_order_relaxed);
      }
    }
  }
  shown_->ranges->count([&](const auto& look) {
    for (const Part& part : batch.parts) {
      if (part.index == 0) look(part.request->request);
    }
  });
  computer.executor.execute(batch.parts);
  device.inflight_batches.fetch_sub(1, std::memory_order_relaxed);
  // Buffers only grow.
  const std::size_t bytes = computer.executor.buffer_bytes();
  shown_->buffer_bytes.fetch_add(bytes - computer.counted_bytes, std::memory_order_relaxed);
  computer.counted_bytes = bytes;
}

void ServedModel::on_pass(const PassTimings& pass, Duration split) {
  metrics_->observe_pass(pass, split);
  scheduler_.observe(pass.samples, pass.assemble + pass.transfer + pass.forward + split, pass.cpu);
}

void ServedModel::on_scores(const Scores& scores, std::int64_t samples) {
  shown_->scores->count(scores, samples);
}

void ServedModel::on_retry(std::size_t parts, const std::string& error) {
  log_.client_warning("batch_failed_retrying_each",
                      {{"requests", static_cast<std::int64_t>(parts)}, {"error", error}});
}

Refusal ServedModel::on_failure(const std::exception& failure) {
  if (out_of_memory(failure)) {
    log_.client_warning("out_of_memory", {{"model", name()}, {"error", failure.what()}});
    return out_of_memory_refusal();
  }
  const std::string id = new_error_id();
  log_.error("internal_error", {{"error_id", id}, {"model", name()}, {"error", failure.what()}});
  return {{Code::kInternal, "internal error, id " + id + " in the server's log"}, std::nullopt};
}

}  // namespace tessera
