#include "batching/request_queue.h"

#include <algorithm>
#include <new>
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

bool RequestQueue::push(std::span<Part> parts, TimePoint now, std::vector<DroppedPart>& dropped) {
  std::int64_t samples = 0;
  for (const Part& part : parts) samples += part.samples();
  if (!fits(samples)) {
    purge(now, dropped);
    if (!fits(samples)) return false;
  }
  const auto level = by_priority_.try_emplace(parts.front().request->priority).first;
  const std::size_t before = level->second.size();
  std::int64_t ids = 0;
  try {
    for (Part& part : parts) {
      ids += part.ids;
      level->second.push_back(std::move(part));
    }
  } catch (const std::bad_alloc&) {
    level->second.resize(before);
    if (before == 0) by_priority_.erase(level);
    throw;
  }
  parts_ += static_cast<std::int64_t>(parts.size());
  samples_ += samples;
  ids_ += ids;
  requests_ += 1;
  return true;
}

void RequestQueue::purge(TimePoint now, std::vector<DroppedPart>& dropped) {
  // Nothing below allocates.
  dropped.reserve(dropped.size() + static_cast<std::size_t>(parts_));
  for (auto level = by_priority_.begin(); level != by_priority_.end();) {
    std::deque<Part>& parts = level->second;
    auto kept = parts.begin();
    for (auto part = parts.begin(); part != parts.end(); ++part) {
      const auto reason = drop_reason(*part, now);
      if (reason.has_value()) {
        forget(*part);
        dropped.push_back({std::move(*part), *reason});
      } else {
        if (kept != part) *kept = std::move(*part);
        ++kept;
      }
    }
    parts.erase(kept, parts.end());
    level = parts.empty() ? by_priority_.erase(level) : std::next(level);
  }
}

namespace {

// Whether `parts` has room for one more; false where there is no memory for it.
template <typename T>
bool has_room(std::vector<T>& parts) {
  if (parts.size() < parts.capacity()) return true;
  try {
    parts.reserve(2 * parts.capacity() + 16);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

}  // namespace

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
      if (!(reason.has_value() ? has_room(dropped) : has_room(taken))) return;
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
