#include "batching/policy.h"

#include <algorithm>

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

Decision decide(const QueueState& state, const BatchLimits& limits, TimePoint now) {
  using Kind = Decision::Kind;
  if (state.entries == 0) return {};
  if (state.samples >= limits.max_samples || state.ids >= limits.max_ids) {
    return {Kind::kCut, CutReason::kFull, now};
  }
  if (state.draining) return {Kind::kCut, CutReason::kDrain, now};
  if (limits.max_delay == Duration::zero()) return {Kind::kCut, CutReason::kIdle, now};
  const TimePoint company_ends = state.oldest + limits.max_delay;
  if (now >= company_ends) return {Kind::kCut, CutReason::kDelay, now};
  if (state.earliest_deadline == kNever) return {Kind::kWaitUntil, CutReason::kIdle, company_ends};
  // Twice the usual pass: the answer has to travel, and the pass may be slower than usual.
  const TimePoint latest_start = state.earliest_deadline - 2 * state.expected_forward;
  if (now >= latest_start) return {Kind::kCut, CutReason::kDeadline, now};
  return {Kind::kWaitUntil, CutReason::kIdle, std::min(company_ends, latest_start)};
}

}  // namespace tessera
