#include "batching/batch_scheduler.h"

#include <new>
#include <utility>

#include "common/out_of_memory.h"
#include "common/text.h"

namespace tessera {

Status BatchScheduler::submit(std::vector<Part> parts, std::vector<DroppedPart>& dropped) {
  std::vector<RefusedRequest> refused;
  submit(std::span(parts), dropped, refused);
  return refused.empty() ? Status() : std::move(refused.front().status);
}

Status BatchScheduler::push(std::span<Part> parts, TimePoint now,
                            std::vector<DroppedPart>& dropped) {
  if (closed_) return {Code::kUnavailable, "the server is draining"};
  if (queue_.push(parts, now, dropped)) return {};
  std::int64_t samples = 0;
  for (const Part& part : parts) samples += part.samples();
  return {Code::kResourceExhausted,
          text("the queue is full: ", queue_.requests(), " requests with ", queue_.samples(),
               " samples wait (limits ", queue_limits_.max_requests, " and ",
               queue_limits_.max_samples, "), this request brings ", samples, "; try again later")};
}

Condition* BatchScheduler::take(std::span<Part> parts, std::vector<DroppedPart>& dropped,
                                std::vector<RefusedRequest>& refused) {
  // Now, so that nothing throws once a request has been taken.
  refused.reserve(refused.size() + parts.size());
  const TimePoint now = clock_.now();
  while (!parts.empty()) {
    std::size_t count = 1;  // parts of the first request
    while (!parts[count - 1].last) ++count;
    PendingRequest* const request = parts.front().request;
    Status status;
    try {
      status = push(parts.first(count), now, dropped);
    } catch (const std::bad_alloc&) {
      status = out_of_memory_status();
    }
    if (!status.ok()) refused.push_back({request, count, std::move(status)});
    parts = parts.subspan(count);
  }
  return worker_to_wake();
}

void BatchScheduler::submit(std::span<Part> parts, std::vector<DroppedPart>& dropped,
                            std::vector<RefusedRequest>& refused) {
  MutexLock lock(mutex_);
  Condition* const woken = take(parts, dropped, refused);
  lock.release();
  // Outside the lock, so that the woken worker does not run into it.
  if (woken != nullptr) woken->notify_one();
}

bool BatchScheduler::try_submit(std::span<Part> parts, std::vector<DroppedPart>& dropped,
                                std::vector<RefusedRequest>& refused) {
  if (!mutex_.try_lock()) return false;
  Condition* woken = nullptr;
  try {
    woken = take(parts, dropped, refused);
  } catch (...) {
    mutex_.unlock();
    throw;
  }
  mutex_.unlock();
  if (woken != nullptr) woken->notify_one();
  return true;
}

void BatchScheduler::show() {
  shown_.free_workers.store(idle_workers_.count - idle_workers_.waking, std::memory_order_relaxed);
  shown_.ending.store(draining_ || closed_, std::memory_order_relaxed);
}

Outlook BatchScheduler::outlook() const {
  return {.free_workers = shown_.free_workers.load(std::memory_order_relaxed),
          .work = {.fixed_seconds = shown_.fixed_seconds.load(std::memory_order_relaxed),
                   .per_sample_seconds = shown_.per_sample_seconds.load(std::memory_order_relaxed)},
          .ending = shown_.ending.load(std::memory_order_relaxed)};
}

QueueState BatchScheduler::state(WorkerKind asks) const {
  QueueState state{.parts = queue_.parts(),
                   .samples = queue_.samples(),
                   .ids = queue_.ids(),
                   .work = work_.cost(),
                   .draining = draining_ || closed_,
                   .asks = asks};
  if (batch_limits_.max_delay > Duration::zero() && state.parts > 0) {
    state.oldest = queue_.oldest();
    state.earliest_deadline = queue_.earliest_deadline();
    state.time = time_.cost();
  }
  return state;
}

Condition* BatchScheduler::worker_to_wake() {
  if (queue_.parts() == 0) return nullptr;
  const bool much = heavy(state(WorkerKind::kOrdinary));
  Idle* woken = nullptr;
  if (idle_workers_.wakes(much)) {
    woken = &idle_workers_;
  } else if (idle_workers_.count == idle_workers_.waking && much && idle_spares_.wakes(much)) {
    woken = &idle_spares_;
  }
  if (woken == nullptr) return nullptr;
  ++woken->waking;
  show();
  return &woken->changed;
}

void BatchScheduler::cut(std::int64_t max_samples, CutReason reason, TimePoint now,
                         CutBatch& batch) {
  batch.reason = reason;
  queue_.cut(max_samples, batch_limits_.max_ids, now, batch.parts, batch.dropped);
}

bool BatchScheduler::next(WorkerKind kind, CutBatch& batch) {
  batch.parts.clear();
  batch.dropped.clear();
  MutexLock lock(mutex_);
  while (true) {
    const TimePoint now = clock_.now();
    const Decision decision = decide(state(kind), batch_limits_, now);
    if (decision.kind == Decision::Kind::kCut) {
      cut(decision.samples, decision.reason, now, batch);
      // What is left is for another worker; the submitter that brought it may have seen none
      // idle or may have woken this one.
      Condition* const woken = worker_to_wake();
      lock.release();
      if (woken != nullptr) woken->notify_one();
      return true;
    }
    if (closed_ && (kind == WorkerKind::kSpare || queue_.parts() == 0)) return false;
    Idle& waiting = idle(kind);
    ++waiting.count;
    show();
    if (decision.kind == Decision::Kind::kWaitUntil) {
      waiting.changed.wait_until(mutex_, decision.time);
    } else {
      waiting.changed.wait(mutex_);
    }
    --waiting.count;
    if (waiting.waking > 0) --waiting.waking;
    show();
  }
}

void BatchScheduler::observe(std::int64_t samples, Duration took, Duration cpu) {
  if (!mutex_.try_lock()) return;
  time_.observe(samples, took);
  work_.observe(samples, cpu);
  const PassCost work = work_.cost();
  shown_.fixed_seconds.store(static_cast<float>(work.fixed_seconds), std::memory_order_relaxed);
  shown_.per_sample_seconds.store(static_cast<float>(work.per_sample_seconds),
                                  std::memory_order_relaxed);
  mutex_.unlock();
}

void BatchScheduler::drain() {
  const MutexLock lock(mutex_);
  draining_ = true;
  show();
  idle_workers_.changed.notify_all();
  idle_spares_.changed.notify_all();
}

void BatchScheduler::close() {
  const MutexLock lock(mutex_);
  closed_ = true;
  show();
  idle_workers_.changed.notify_all();
  idle_spares_.changed.notify_all();
}

QueueDepth BatchScheduler::depth() const {
  const MutexLock lock(mutex_);
  return {queue_.requests(), queue_.samples()};
}

}  // namespace tessera
