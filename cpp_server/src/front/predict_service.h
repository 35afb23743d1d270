// A call for scores between its bytes and its model, without a transport: parse, find the model,
// check, submit; and on the way back count and encode. wire_protocol.h has what differs between
// Predict and ModelInfer. Every call ends in exactly one count of tessera_requests_total and, when
// it was refused, one of tessera_rejected_total; each of these counts
// is told to the observer, where there is one.
//
// Contract: start is called once per use of a PredictCall, from any thread, and does not
// block; send_reply (after begin_reply) or refuse is called exactly once after it, from any
// thread, perhaps before start returns, and is the last use of the call.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "batching/pending_request.h"
#include "common/byte_share.h"
#include "common/clock.h"
#include "front/admission.h"
#include "front/byte_budget.h"
#include "front/recent_requests.h"
#include "front/shadow_call.h"
#include "front/wire_protocol.h"
#include "metrics/model_metrics.h"
#include "metrics/shadow_list.h"
#include "model/registry.h"
#include "observe/call_observer.h"
#include "observe/call_record.h"
#include "request/wire.h"
#include "server/log.h"

namespace tessera {

// What every call needs; all of it outlives every call.
struct PredictContext {
  const Registry& registry;
  ModelMetrics& unresolved;  // counts calls that name no known model
  Admission& admission;
  ByteBudget& budget;
  const Clock& clock;
  const Log& log;
  ShadowList* shadows = nullptr;          // null: no model has a shadow
  RecentRequests* recent = nullptr;       // null: no version will come
  CallObserver* observer = nullptr;       // null: nothing is told of single calls
  SharedMemory* shared_memory = nullptr;  // null: tensors come in messages alone
};

class PredictCall : public PendingRequest {
 public:
  PredictCall(const PredictContext& context, std::unique_ptr<WireProtocol> protocol)
      : context_(context), protocol_(std::move(protocol)) {}

 protected:
  // Answers `message`, which must live until send_reply or refuse. `deadline` of the base
  // class and `cancelled` are the transport's to set, the former before this.
  void start(Bytes message);

  // The transport's memory for a response of `bytes` bytes; send_reply follows. Throws
  // std::bad_alloc.
  virtual std::byte* begin_reply(std::size_t bytes) = 0;
  virtual void send_reply() = 0;
  virtual void refuse(const Status& status) = 0;

  // Who calls, for shares of the traffic where the message does not say: the call's x-request-id,
  // else the address of its peer. Only called by start.
  virtual std::string_view caller() = 0;

  // The call's traceparent header; empty: it has none. Only called by start and count_refused.
  virtual std::string_view trace_header() = 0;

  // Fills in where the call comes from. Only called by start and count_refused, where the call is
  // told of or its request is recorded.
  virtual void tell_origin(CallRecord& record) = 0;

  // HTTP's status for `code`; 0: the call did not come over HTTP/1.1.
  virtual int http_status(Code /*code*/) const { return 0; }

  // What is told of this use of the call; null: nothing, or there is no memory for it.
  const CallRecord* record() const { return told_ ? record_.get() : nullptr; }

  // Hands this decoded request to its model.
  virtual void submit_to(const std::shared_ptr<ServedModel>& model) = 0;

  // What the calls of the same connection hold of the budget.
  virtual ByteShare& connection_share() = 0;

  // Nobody looks at the message or at `request` any more. Whether the transport has given their
  // memory back, as it does with what is large: a client may take its time to read the answer.
  virtual bool release_request() = 0;

  // Memory that the call has for what it makes of messages, and an end of it; for release_request.
  std::size_t held_bytes() const { return request.joined.bytes() + protocol_->held_bytes(); }
  void free_memory() {
    request = DecodedRequest();
    protocol_->free_memory();
  }

  // To be called by the transport instead of start when it has refused the call with `status`
  // before its message had come.
  void count_refused(const Status& status);

  // To be called when what was sent has left: the drain waits for it.
  void leave();

 private:
  void answer(std::span<const OutputView> outputs, const StageTimings& timings) final;
  void fail(const Refusal& refusal) final;
  void parse_and_submit(Bytes message);
  std::shared_ptr<ServedModel> named_model(Bytes message);
  void begin_record();
  void record_request(Bytes message);
  void tell(const ModelMetrics& metrics, Code code, Duration took);
  void count(Code code);
  void keep_some(Bytes message);
  std::unique_ptr<ShadowCall> copy_for_shadow(Bytes message, std::string_view key);
  bool hold(std::size_t message_bytes);
  void give_back(std::int64_t bytes);

  const PredictContext& context_;
  const std::unique_ptr<WireProtocol> protocol_;
  bool inside_ = false;
  bool decoded_ = false;         // `request` is that of the message
  std::int64_t held_bytes_ = 0;  // of the budget
  TimePoint began_{};
  std::shared_ptr<ShadowComparison> comparison_;  // with the shadow's scores; null: there are none
  std::shared_ptr<ServedModel> model_;            // until it has been answered
  std::unique_ptr<CallRecord> record_;            // kept for the next use
  bool told_ = false;                             // record_ is of this use
};

}  // namespace tessera
