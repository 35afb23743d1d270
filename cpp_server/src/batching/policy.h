// When a batch is cut, and by which worker: a pure function of (state, now).
//
// A free worker takes whatever is queued. With max_delay above zero it first waits that long for
// more requests, but never so long that a waiting request would miss its deadline.
//
// There may be spare workers, on the CPUs that the network's threads need while requests are
// small. They are idle unless the work that is queued is heavy: it would keep a worker busy for
// kSpareBacklog, and computing a request of it takes longer than the network's part of one, so
// that the narrow place is the forward pass. Then they take part, and what is queued is divided
// between all workers instead of going to the first, in shares of which the fixed cost of a
// pass is a small part.
//
// A thread that brings requests may run their pass itself instead of waking an idle worker for it,
// if the pass is short: between two turns of an event loop.
//
// Contract: no state, no clock of its own, any thread.
#pragma once

#include <cstdint>
#include <string_view>

#include "batching/cost_model.h"
#include "common/clock.h"
#include "common/enums.h"

namespace tessera {

// Why a batch was cut: the `reason` label of tessera_batches_total.
enum class CutReason { kFull, kDelay, kIdle, kDeadline, kDrain };
inline constexpr auto kCutReasons = enum_size<CutReason::kDrain>();

std::string_view reason_name(CutReason reason);

struct BatchLimits {
  std::int64_t max_samples = 512;
  std::int64_t max_ids = 262'144;
  Duration max_delay{0};
  // Workers that heavy work is divided between; 1: a batch takes all that fits.
  int sharers = 1;
};

// What gRPC and the kernel use of a CPU to bring in and answer a small request is about 25 us
// of the server and as much of a client on the same machine. The work of a pass is compared in the
// same unit: time would make every request heavy on a machine whose CPUs others have.
inline constexpr Duration kNetworkPerRequest = std::chrono::microseconds(50);
// Waking a thread, and the caches that it finds cold, cost tens of microseconds.
inline constexpr Duration kSpareBacklog = std::chrono::microseconds(300);
// A share is at least so large that what its samples cost is this many times the pass's fixed cost.
inline constexpr double kShareOverFixed = 4;

// Waking a worker and being woken by it costs some 20 us of a CPU, and an answer waits twice for
// the system to run a thread. In place of that the calls that come meanwhile wait for a pass of so
// long at most. With 100 us here, a model whose passes take that long lost a third of its
// requests/s to one connection: its one loop did the work of two threads.
inline constexpr Duration kShortPass = std::chrono::microseconds(40);
// What a pass costs is known by its samples. So many ids take some 25 us.
inline constexpr std::int64_t kShortPassIds = 1'024;

enum class WorkerKind { kOrdinary, kSpare };

// What the decision looks at when a worker of kind `asks` is free.
struct QueueState {
  std::int64_t parts = 0;
  std::int64_t samples = 0;
  std::int64_t ids = 0;
  TimePoint oldest = kNever;             // when the longest-waiting part came
  TimePoint earliest_deadline = kNever;  // of all waiting parts
  PassCost time = {};                    // of passes lately: what an answer waits for
  PassCost work = {};                    // of passes lately: what they used of a CPU
  bool draining = false;                 // no more requests will come
  WorkerKind asks = WorkerKind::kOrdinary;
};

// The same for a thread that brings requests: what it has brought since its turn began.
struct TurnState {
  std::int64_t parts = 0;
  std::int64_t samples = 0;
  std::int64_t ids = 0;
  bool shared_rows = false;  // a request has features that its samples share
  PassCost work = {};        // of passes lately: what they used of a CPU
  bool draining = false;     // no more requests will come
  int free_workers = 0;      // ordinary ones that wait for requests
};

struct Decision {
  enum class Kind {
    kCut,             // cut now, for `reason`
    kWaitUntil,       // ask again at `time`
    kWaitForRequest,  // nothing to do before a request comes
  };
  Kind kind = Kind::kWaitForRequest;
  CutReason reason = CutReason::kIdle;
  TimePoint time = kNever;
  std::int64_t samples = 0;  // to cut: how many at most, but one part in any case
};

// Whether what is queued is worth a spare worker.
bool heavy(const QueueState& state);

Decision decide(const QueueState& state, const BatchLimits& limits, TimePoint now);

// Whether the thread that brings requests runs the pass of what it has brought. Never while no
// worker is free: the next one takes what has gathered until then, at no cost of waking it. Never
// where nothing is known of what passes cost.
bool runs_here(const TurnState& state, const BatchLimits& limits);

}  // namespace tessera
