#include "batching/request_queue.h"

#include <algorithm>
#include <utility>

namespace tessera {

std::optional<RejectReason> drop_reason(const Part& part, TimePoint now) {
  const TimePoint deadline = part.request->deadline;
  if (now >= deadline) return RejectReason::kDeadline;
  if (!part.request->abandoned()) return std::nullopt;
  // gRPC cancels a call when its deadline passes.
  return ended_by_deadline(now, part.request->arrival, deadline) ? RejectReason::kDeadline
                                                                 : RejectReason::kCancelled;
}

bool RequestQueue::fits(std::int64_t samples) const {
  return requests_ < limits_.max_requests && samples_ + samples <= limits_.max_samples;
}

void RequestQueue::forget(const Part& part) {
  parts_ -= 1;
  if (part.last) requests_ -= 1;
  samples_ -= part.samples();
  ids_ -= part.ids;
}

bool RequestQueue::push(std::vector<Part>& parts, TimePoint now,
                        std::vector<DroppedPart>& dropped) {
  std::int64_t samples = 0;
  for (const Part& part : parts) samples += part.samples();
  if (!fits(samples)) {
    purge(now, dropped);
    if (!fits(samples)) return false;
  }
  std::deque<Part>& level = by_priority_[parts.front().request->priority];
  for (Part& part : parts) {
    parts_ += 1;
    samples_ += part.samples();
    ids_ += part.ids;
    level.push_back(std::move(part));
  }
  requests_ += 1;
  return true;
}

void RequestQueue::purge(TimePoint now, std::vector<DroppedPart>& dropped) {
  for (auto level = by_priority_.begin(); level != by_priority_.end();) {
    std::deque<Part> kept;
    for (Part& part : level->second) {
      const auto reason = drop_reason(part, now);
      if (reason.has_value()) {
        forget(part);
        dropped.push_back({std::move(part), *reason});
      } else {
        kept.push_back(std::move(part));
      }
    }
    level->second = std::move(kept);
    level = level->second.empty() ? by_priority_.erase(level) : std::next(level);
  }
}

void RequestQueue::cut(std::int64_t max_samples, std::int64_t max_ids, TimePoint now,
                       std::vector<Part>& taken, std::vector<DroppedPart>& dropped) {
  std::int64_t samples = 0;
  std::int64_t ids = 0;
  const SharedRows* sharing = nullptr;  // of the first part that shares rows
  while (!by_priority_.empty()) {
    const auto level = by_priority_.begin();
    std::deque<Part>& parts = level->second;
    while (!parts.empty()) {
      Part& part = parts.front();
      const auto reason = drop_reason(part, now);
      const SharedRows& shared = part.request->request.shared;
      const bool full =
          samples + part.samples() > max_samples || ids + part.ids > max_ids ||
          (sharing != nullptr && shared.any() && shared.features != sharing->features);
      if (!reason.has_value() && !taken.empty() && full) return;
      forget(part);
      if (reason.has_value()) {
        dropped.push_back({std::move(part), *reason});
      } else {
        samples += part.samples();
        ids += part.ids;
        if (shared.any()) sharing = &shared;
        taken.push_back(std::move(part));
      }
      parts.pop_front();
    }
    by_priority_.erase(level);
  }
}

TimePoint RequestQueue::oldest() const {
  TimePoint oldest = kNever;
  for (const auto& [priority, parts] : by_priority_) {
    oldest = std::min(oldest, parts.front().request->arrival);
  }
  return oldest;
}

TimePoint RequestQueue::earliest_deadline() const {
  TimePoint earliest = kNever;
  for (const auto& [priority, parts] : by_priority_) {
    for (const Part& part : parts) earliest = std::min(earliest, part.request->deadline);
  }
  return earliest;
}

}  // namespace tessera
