// The bounded queue of one model. Order: higher priority first, then arrival. A part whose
// request was cancelled, has failed or has passed its deadline is dropped when a batch is cut
// or when its place is needed, never computed.
//
// Contract: not thread-safe (BatchScheduler guards it); no clock of its own; never blocks. It does
// not own the requests behind its parts, which live until their parts have been delivered or
// dropped.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "batching/pending_request.h"
#include "common/clock.h"

namespace tessera {

// A request waits from its arrival until its last part is taken, however many parts it has: one
// that may be sent at all fits an empty queue.
struct QueueLimits {
  std::int64_t max_requests = 4'096;
  std::int64_t max_samples = 65'536;
};

// A part that will not be computed; the caller drops it with this reason, outside any lock.
struct DroppedPart {
  Part part;
  RejectReason reason;
};

class RequestQueue {
 public:
  explicit RequestQueue(QueueLimits limits) : limits_(limits) {}

  // Takes all of `parts` (of one request), or none: false when there is no room even without
  // those that need not be computed, which are moved to `dropped`. Throws std::bad_alloc, and has
  // taken none then.
  bool push(std::span<Part> parts, TimePoint now, std::vector<DroppedPart>& dropped);

  // Moves the first parts that fit together to `taken` and those before them that need not be
  // computed to `dropped`. The first part to compute is taken whatever its size, so that none waits
  // for ever; where there is no memory for a longer list of them, the batch is smaller. Parts that
  // share other features than those before them do not fit: a batch has one set of them.
  void cut(std::int64_t max_samples, std::int64_t max_ids, TimePoint now, std::vector<Part>& taken,
           std::vector<DroppedPart>& dropped);

  std::int64_t parts() const { return parts_; }
  // Whose last part waits.
  std::int64_t requests() const { return requests_; }
  std::int64_t samples() const { return samples_; }
  std::int64_t ids() const { return ids_; }

  // When the part that waits longest came; kNever when none waits.
  TimePoint oldest() const;
  // The next deadline of a waiting part; kNever when there is none. Looks at every part.
  TimePoint earliest_deadline() const;

 private:
  bool fits(std::int64_t samples) const;
  void purge(TimePoint now, std::vector<DroppedPart>& dropped);
  void forget(const Part& part);

  QueueLimits limits_;
  std::map<std::int32_t, std::deque<Part>, std::greater<>> by_priority_;
  std::int64_t parts_ = 0;
  std::int64_t requests_ = 0;
  std::int64_t samples_ = 0;
  std::int64_t ids_ = 0;
};

// Why `part` must not be computed, if it must not.
std::optional<RejectReason> drop_reason(const Part& part, TimePoint now);

}  // namespace tessera
