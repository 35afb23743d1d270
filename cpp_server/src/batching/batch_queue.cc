#include "batching/batch_queue.h"

#include <utility>

#include "common/text.h"

namespace tessera {

Status BatchQueue::submit(std::vector<Part> parts, std::vector<DroppedPart>& dropped) {
  bool wake = false;
  {
    const MutexLock lock(mutex_);
    if (!queue_.push(parts, clock_.now(), dropped)) {
      std::int64_t samples = 0;
      for (const Part& part : parts) samples += part.samples();
      return {Code::kResourceExhausted,
              text("the queue is full: ", queue_.entries(), " requests with ", queue_.samples(),
                   " samples wait (limits ", queue_limits_.max_entries, " and ",
                   queue_limits_.max_samples, "), this request brings ", samples,
                   "; try again later")};
    }
    wake = idle_workers_ > 0;
  }
  // Outside the lock, so that the woken worker does not run into it.
  if (wake) changed_.notify_one();
  return {};
}

bool BatchQueue::next(CutBatch& batch) {
  batch.parts.clear();
  batch.dropped.clear();
  MutexLock lock(mutex_);
  while (true) {
    const TimePoint now = clock_.now();
    QueueState state{.entries = queue_.entries(),
                     .samples = queue_.samples(),
                     .ids = queue_.ids(),
                     .draining = draining_ || closed_};
    if (batch_limits_.max_delay > Duration::zero() && state.entries > 0) {
      state.oldest = queue_.oldest();
      state.earliest_deadline = queue_.earliest_deadline();
      state.expected_forward = cost_.predict(state.samples);
    }
    const Decision decision = decide(state, batch_limits_, now);
    if (decision.kind == Decision::Kind::kCut) {
      batch.reason = decision.reason;
      queue_.cut(batch_limits_.max_samples, batch_limits_.max_ids, now, batch.parts,
                 batch.dropped);
      // What is left is for another worker; the submitter that brought it may have seen none
      // idle or may have woken this one.
      const bool more = queue_.entries() > 0 && idle_workers_ > 0;
      lock.release();
      if (more) changed_.notify_one();
      return true;
    }
    if (closed_ && state.entries == 0) return false;
    ++idle_workers_;
    if (decision.kind == Decision::Kind::kWaitUntil) {
      changed_.wait_until(mutex_, decision.time);
    } else {
      changed_.wait(mutex_);
    }
    --idle_workers_;
  }
}

void BatchQueue::observe(std::int64_t samples, Duration took) {
  if (batch_limits_.max_delay == Duration::zero()) return;  // nobody asks for the estimate
  const MutexLock lock(mutex_);
  cost_.observe(samples, took);
}

void BatchQueue::drain() {
  {
    const MutexLock lock(mutex_);
    draining_ = true;
  }
  changed_.notify_all();
}

void BatchQueue::close() {
  {
    const MutexLock lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

QueueDepth BatchQueue::depth() const {
  const MutexLock lock(mutex_);
  return {queue_.entries(), queue_.samples()};
}

}  // namespace tessera
