#include "front/scoring_call.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "observe/request_ids.h"

namespace tessera {
namespace {

// Calls kept for reuse; a burst above it allocates and frees.
constexpr std::size_t kKeptCalls = 1'024;
// A call that has made more than this of a message gives that memory back instead of keeping it.
constexpr std::size_t kKeptBytes = 256 * 1024;

class ScoringMethod;

class ScoringCall final : public PredictCall, public http2::Call {
 public:
  ScoringCall(const PredictContext& context, std::unique_ptr<WireProtocol> protocol,
              http2::EventLoop& its_loop, ScoringMethod& method)
      : PredictCall(context, std::move(protocol)),
        Call(Kind::kUnary, its_loop),
        clock_(context.clock),
        method_(method) {}

 private:
  // http2::Call
  void on_message(std::span<const std::byte> message) override {
    deadline = call_deadline();
    cancelled.store(false, std::memory_order_relaxed);
    start(message);
  }
  void on_cancelled() override { cancelled.store(true, std::memory_order_relaxed); }
  void on_refused(const Status& status) override { count_refused(status); }
  void on_end() override;

  // PredictCall
  std::byte* begin_reply(std::size_t bytes) override { return begin_message(bytes); }
  void send_reply() override { finish({}); }
  void refuse(const Status& status) override;
  std::string_view caller() override { return request_id().empty() ? peer() : request_id(); }
  std::string_view trace_header() override { return traceparent(); }
  void tell_origin(CallRecord& record) override;
  void submit_to(const std::shared_ptr<ServedModel>& model) override;
  ByteShare& connection_share() override { return Call::connection_share(); }
  bool release_request() override;

  const Clock& clock_;
  ScoringMethod& method_;
};

// At the end of a turn of its loop it tells the models that the turn has brought requests of.
class ScoringMethod final : public http2::Method, private http2::EventLoop::Deferred {
 public:
  ScoringMethod(const PredictContext& context, http2::Server& server, std::size_t loop,
                MakeProtocol make_protocol)
      : context_(context),
        counters_(server.counters()),
        loop_(server.loop(loop)),
        loop_index_(loop),
        make_protocol_(std::move(make_protocol)) {}

  http2::Call& begin(http2::EventLoop& loop) override {
    if (free_.empty()) return *new ScoringCall(context_, make_protocol_(), loop, *this);
    ScoringCall* const call = free_.back().release();
    free_.pop_back();
    return *call;
  }

  void put(std::unique_ptr<ScoringCall> call) {
    if (free_.size() < kKeptCalls) free_.push_back(std::move(call));
  }

  void submit(PendingRequest& request, const std::shared_ptr<ServedModel>& model) {
    if (std::find(asked_.begin(), asked_.end(), model) == asked_.end()) asked_.push_back(model);
    loop_.defer(*this);
    model->submit(request, loop_index_);
  }

  http2::Counters& counters() { return counters_; }

 private:
  void on_turn_end() override {
    for (const auto& model : asked_) model->end_turn(loop_index_);
    asked_.clear();
  }

  const PredictContext& context_;
  http2::Counters& counters_;
  http2::EventLoop& loop_;
  const std::size_t loop_index_;
  std::vector<std::shared_ptr<ServedModel>> asked_;  // in this turn
  const MakeProtocol make_protocol_;
  std::vector<std::unique_ptr<ScoringCall>> free_;
};

void ScoringCall::tell_origin(CallRecord& record) {
  record.protocol = "grpc";
  record.peer = peer();
  choose_request_id(request_id(), record.request_id);
  if (record.logged) tell_request_id(record.request_id);
}

void ScoringCall::submit_to(const std::shared_ptr<ServedModel>& model) {
  method_.submit(*this, model);
}

void ScoringCall::on_end() {
  leave();
  method_.put(std::unique_ptr<ScoringCall>(this));
}

void ScoringCall::refuse(const Status& status) {
  if (status.code == Code::kResourceExhausted) {
    method_.counters().note_full_of_calls(clock_.now());
  }
  finish(status);
}

bool ScoringCall::release_request() {
  if (held_bytes() <= kKeptBytes && message_bytes() <= kKeptBytes) return false;
  release_message();
  free_memory();
  return true;
}

}  // namespace

std::unique_ptr<http2::Method> make_scoring_method(const PredictContext& context,
                                                   http2::Server& server, std::size_t loop,
                                                   MakeProtocol make_protocol) {
  return std::make_unique<ScoringMethod>(context, server, loop, std::move(make_protocol));
}

}  // namespace tessera
