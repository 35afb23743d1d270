// A request on its way through the server, and the parts in which it is computed.
//
// Contract of PendingRequest: the RPC layer owns it and fills it before it is submitted; from
// then until answer() or fail() has been called, once, by a worker or by the submitting
// thread, nobody may change or destroy it. `cancelled` alone may be set at any time by any
// thread. deliver() and drop() may be called from several workers at once, one per part.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/clock.h"
#include "common/enums.h"
#include "common/mutex.h"
#include "common/status.h"
#include "request/decoded_request.h"
#include "request/wire.h"

namespace tessera {

// Why a request was refused: the `reason` label of tessera_rejected_total.
enum class RejectReason { kQueueFull, kDeadline, kCancelled, kInvalid, kDraining };
inline constexpr auto kRejectReasons = enum_size<RejectReason::kDraining>();

std::string_view reason_name(RejectReason reason);

// Whether a call that its client ended, ended because its deadline passed: the client's timer and
// our clock do not strike at the same instant, and gRPC tells us the time that the client gives in
// three digits, rounded up.
inline bool ended_by_deadline(TimePoint now, TimePoint arrival, TimePoint deadline) {
  const Duration timeout = deadline - arrival;
  const Duration slack = std::max<Duration>(std::chrono::milliseconds(5), timeout / 100);
  return now >= deadline - slack;
}

// How long the stages of one forward pass took, and who shared it.
struct PassTimings {
  TimePoint started{};  // when the worker took the batch
  Duration assemble{0};
  Duration transfer{0};
  Duration forward{0};
  TimePoint computed{};  // when the scores were there
  Duration cpu{0};       // what the worker's own thread used for all of that
  std::int64_t requests = 0;
  std::int64_t samples = 0;
  std::int64_t ids = 0;
  std::int64_t commit = 0;  // the state of the model's weights that it was computed with
};

// A refusal or failure. `reason` is set where tessera_rejected_total counts it.
struct Refusal {
  Status status;
  std::optional<RejectReason> reason;
};

// Of a request for which the system has no memory: it alone is refused, and counts as one for which
// there was no room.
Refusal out_of_memory_refusal();

class PendingRequest {
 public:
  PendingRequest() = default;
  virtual ~PendingRequest() = default;
  PendingRequest(const PendingRequest&) = delete;
  PendingRequest& operator=(const PendingRequest&) = delete;

  DecodedRequest request;
  TimePoint arrival{};
  Duration decode{0};
  TimePoint deadline = kNever;
  std::int32_t priority = 0;
  std::atomic<bool> cancelled = false;

  // Announces that the request will be computed in `parts` parts, before it is submitted.
  void expect_parts(std::size_t parts, std::size_t outputs);

  // The scores of part `part`; `rows` is what each output has of them, in the schema's order.
  // The memory is used during the call only. Where there is no memory to keep them until the other
  // parts have come, the request fails. False: this was the last part, and they were not all
  // computed with the same state of the weights; the request, of which nothing has been answered,
  // is the caller's again, who cuts it anew and has all of it computed with one.
  bool deliver(std::size_t part, std::span<const OutputView> rows, const PassTimings& pass);

  // The state of the weights that the outputs were computed with; to be asked by answer.
  std::int64_t commit() const { return commit_; }

  // The part was not computed; the request fails with the first refusal of its parts.
  void drop(const Refusal& refusal);

  // Nobody wants its remaining parts: the client is gone or another part has failed.
  bool abandoned() const {
    return cancelled.load(std::memory_order_relaxed) || (joined_ != nullptr && joined_->failed);
  }

 protected:
  // Exactly one of the two is called, once, and is the last use of this object here.
  virtual void answer(std::span<const OutputView> outputs, const StageTimings& timings) = 0;
  virtual void fail(const Refusal& refusal) = 0;

 private:
  // The scores of a request in several parts; one in one part is passed through without a copy.
  struct Joined {
    Mutex mutex;
    std::size_t left TESSERA_GUARDED_BY(mutex) = 0;
    std::vector<std::vector<float>> pieces TESSERA_GUARDED_BY(mutex);  // [part * outputs + output]
    std::vector<std::string_view> names TESSERA_GUARDED_BY(mutex);
    StageTimings timings TESSERA_GUARDED_BY(mutex);                // summed over the parts
    std::optional<std::int64_t> commit TESSERA_GUARDED_BY(mutex);  // of the parts so far
    bool mixed TESSERA_GUARDED_BY(mutex) = false;                  // parts of several commits
    std::optional<Refusal> refusal TESSERA_GUARDED_BY(mutex);      // the first one
    std::atomic<bool> failed = false;
  };

  // What becomes of a request when one of its parts has come.
  enum class Join {
    kNoMemory,  // the part has not been counted
    kWaits,     // for other parts
    kMixed,     // it was the last one, and they are of several commits
    kWhole,
  };

  StageTimings stage_timings(const PassTimings& pass) const;
  Join join(Joined& joined, std::size_t part, std::span<const OutputView> rows,
            const StageTimings& timings, std::int64_t commit);
  void finish_joined(Joined& joined);

  std::unique_ptr<Joined> joined_;
  std::int64_t commit_ = 0;
};

// A piece of work: rows [row_begin, row_end) of a request.
struct Part {
  PendingRequest* request = nullptr;
  std::size_t index = 0;
  bool last = false;  // of the request's parts
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t ids = 0;
  // Of each feature (the id_list ones, then the id_score_list ones): where the part's ids
  // begin among the request's ids of that group, and how many there are. Empty when the part
  // is the whole request.
  std::vector<std::int64_t> id_begin;
  std::vector<std::int64_t> id_count;
  // Of a request that shares rows: the part's are those from the first to the last that its samples
  // use, [shared_begin, shared_end).
  std::int64_t shared_begin = 0;
  std::int64_t shared_end = 0;

  std::int64_t samples() const { return row_end - row_begin; }
  bool whole() const { return id_begin.empty(); }
};

// The request itself if it fits a batch, else consecutive parts of its rows that do. A row
// with more than `max_ids` ids becomes a part of its own, and samples that share many ids stay
// together as long as those that they do not share are at most half of `max_ids`. Appends the parts
// to `parts` and calls expect_parts. Throws std::bad_alloc, and has appended none then.
void cut_request(PendingRequest& request, std::size_t outputs, std::int64_t max_samples,
                 std::int64_t max_ids, std::vector<Part>& parts);

// The same, alone in a list.
std::vector<Part> cut_request(PendingRequest& request, std::size_t outputs,
                              std::int64_t max_samples, std::int64_t max_ids);

}  // namespace tessera
