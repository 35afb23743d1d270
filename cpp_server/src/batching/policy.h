// When a batch is cut: a pure function of (state, now).
//
// A free worker takes whatever is queued. With max_delay above zero it first waits that long
// for company, but never so long that a waiting request would miss its deadline.
//
// Contract: no state, no clock of its own, any thread.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/clock.h"

namespace tessera {

// Why a batch was cut: the `reason` label of tessera_batches_total.
enum class CutReason { kFull, kDelay, kIdle, kDeadline, kDrain };
inline constexpr int kCutReasons = 5;

std::string_view reason_name(CutReason reason);

struct BatchLimits {
  std::int64_t max_samples = 512;
  std::int64_t max_ids = 262'144;
  Duration max_delay{0};
};

// What the decision looks at when a worker is free.
struct QueueState {
  std::int64_t entries = 0;
  std::int64_t samples = 0;
  std::int64_t ids = 0;
  TimePoint oldest = kNever;             // when the longest-waiting entry came
  TimePoint earliest_deadline = kNever;  // of all waiting entries
  Duration expected_forward{0};          // of a batch of these samples
  bool draining = false;                 // no company will come any more
};

struct Decision {
  enum class Kind {
    kCut,           // cut now, for `reason`
    kWaitUntil,     // ask again at `time`
    kWaitForEntry,  // nothing to do before a request comes
  };
  Kind kind = Kind::kWaitForEntry;
  CutReason reason = CutReason::kIdle;
  TimePoint time = kNever;
};

Decision decide(const QueueState& state, const BatchLimits& limits, TimePoint now);

}  // namespace tessera
