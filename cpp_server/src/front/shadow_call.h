// A call that a shadow version computes, too: its scores answer nobody and are compared with those
// that the client got.
//
// It is computed from a copy of the message, behind every request that waits for an answer, and
// dropped where the shadow or the server is busy: nothing that a client sees may depend on it.
//
// Contract: any thread; nothing blocks. What is given outlives the call, which ends before the
// shadow's workers do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "batching/pending_request.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "front/byte_budget.h"
#include "front/wire_protocol.h"
#include "metrics/shadow_list.h"
#include "model/served_model.h"
#include "request/wire.h"

namespace tessera {

// The scores of two versions for one call: whichever comes second is held against the first.
class ShadowComparison {
 public:
  explicit ShadowComparison(std::shared_ptr<ShadowMetrics> metrics)
      : metrics_(std::move(metrics)) {}

  // What either of the two has computed. The memory is used during the call only.
  void computed(std::span<const OutputView> outputs);

  // Either of the two has computed nothing, for a reason that `result` counts; the first counts.
  void ended(ShadowResult result);

 private:
  using Scores = std::map<std::string, std::vector<float>, std::less<>>;

  bool compare(const Scores& first, std::span<const OutputView> second);

  const std::shared_ptr<ShadowMetrics> metrics_;
  Mutex mutex_;
  bool over_ TESSERA_GUARDED_BY(mutex_) = false;
  bool has_first_ TESSERA_GUARDED_BY(mutex_) = false;
  Scores first_ TESSERA_GUARDED_BY(mutex_);
};

class ShadowCall final : public PendingRequest {
 public:
  // A copy of `message`, which `protocol` has decoded, for `shadow` to compute. Null where it is
  // dropped, which has been counted.
  static std::unique_ptr<ShadowCall> copy(Bytes message, const WireProtocol& protocol,
                                          std::shared_ptr<ServedModel> shadow,
                                          std::shared_ptr<ShadowMetrics> metrics,
                                          ByteBudget& budget);
  ~ShadowCall() override;

  const std::shared_ptr<ShadowComparison>& comparison() const { return comparison_; }

  // Checks the message and queues it; `call` owns itself from then on.
  static void compute(std::unique_ptr<ShadowCall> call, const Clock& clock);

 private:
  ShadowCall(std::vector<std::byte> message, std::unique_ptr<WireProtocol> protocol,
             std::shared_ptr<ServedModel> shadow, std::shared_ptr<ShadowMetrics> metrics,
             ByteBudget& budget);

  void answer(std::span<const OutputView> outputs, const StageTimings& timings) override;
  void fail(const Refusal& refusal) override;
  bool prepare(const Clock& clock);

  const std::vector<std::byte> message_;
  const std::unique_ptr<WireProtocol> protocol_;
  const std::shared_ptr<ServedModel> shadow_;
  const std::shared_ptr<ShadowComparison> comparison_;
  ByteBudget& budget_;
  std::int64_t held_bytes_ = 0;
};

}  // namespace tessera
