#include "batching/policy.h"

#include <algorithm>
#include <cmath>

namespace tessera {

std::string_view reason_name(CutReason reason) {
  switch (reason) {
    case CutReason::kFull: return "full";
    case CutReason::kDelay: return "delay";
    case CutReason::kIdle: return "idle";
    case CutReason::kDeadline: return "deadline";
    case CutReason::kDrain: return "drain";
  }
  return "unknown";
}

bool heavy(const QueueState& state) {
  const Duration work = state.work.of(state.samples);
  return work >= kSpareBacklog && work > state.parts * kNetworkPerRequest;
}

namespace {

// Samples of a batch that is cut now.
std::int64_t share(const QueueState& state, const BatchLimits& limits) {
  if (limits.sharers == 1 || !heavy(state)) return limits.max_samples;
  const double fixed = kShareOverFixed * std::max(state.work.fixed_seconds, 0.0);
  // Where passes of one size alone were seen, nothing is known of a smaller one.
  if (fixed >= state.work.per_sample_seconds * static_cast<double>(limits.max_samples)) {
    return limits.max_samples;
  }
  const std::int64_t even = (state.samples + limits.sharers - 1) / limits.sharers;
  const auto least = static_cast<std::int64_t>(std::ceil(fixed / state.work.per_sample_seconds));
  return std::min(std::max(even, least), limits.max_samples);
}

}  // namespace

Decision decide(const QueueState& state, const BatchLimits& limits, TimePoint now) {
  using Kind = Decision::Kind;
  if (state.parts == 0) return {};
  if (state.asks == WorkerKind::kSpare && !heavy(state)) return {};
  const auto cut = [&](CutReason reason) {
    return Decision{Kind::kCut, reason, now, share(state, limits)};
  };
  const auto wait_until = [](TimePoint time) {
    return Decision{Kind::kWaitUntil, CutReason::kIdle, time, 0};
  };
  if (state.samples >= limits.max_samples || state.ids >= limits.max_ids) {
    return cut(CutReason::kFull);
  }
  if (state.draining) return cut(CutReason::kDrain);
  if (limits.max_delay == Duration::zero()) return cut(CutReason::kIdle);
  const TimePoint company_ends = state.oldest + limits.max_delay;
  if (now >= company_ends) return cut(CutReason::kDelay);
  if (state.earliest_deadline == kNever) return wait_until(company_ends);
  // Twice the usual pass: the answer has to travel, and the pass may be slower than usual.
  const TimePoint latest_start = state.earliest_deadline - 2 * state.time.of(state.samples);
  if (now >= latest_start) return cut(CutReason::kDeadline);
  return wait_until(std::min(company_ends, latest_start));
}

bool runs_here(const TurnState& state, const BatchLimits& limits) {
  if (state.parts == 0 || state.free_workers <= 0 || state.draining) return false;
  if (state.shared_rows) return false;                    // a batch has one set of shared features
  if (limits.max_delay > Duration::zero()) return false;  // larger batches are wanted than a turn's
  if (state.samples > limits.max_samples) return false;
  if (state.ids > std::min(kShortPassIds, limits.max_ids)) return false;
  const Duration work = state.work.of(state.samples);
  return work > Duration::zero() && work <= kShortPass;
}

}  // namespace tessera
