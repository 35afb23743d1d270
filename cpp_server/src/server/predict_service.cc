#include "server/predict_service.h"

#include "common/text.h"

namespace tessera {

void PredictCall::start(Bytes message) {
  began_ = context_.clock.now();
  model_ = nullptr;
  expect_parts(1, 0);
  inside_ = context_.gate.enter();
  if (!inside_) {
    fail({{Code::kUnavailable, "the server is draining"}, RejectReason::kDraining});
    return;
  }
  if (!parse_request(message, view_)) {
    fail({Status::invalid(text("the ", message.size(), " bytes are no PredictionRequest")),
          RejectReason::kInvalid});
    return;
  }
  Status status;
  model_ = context_.registry.find(view_.model_name, view_.model_version, status);
  if (model_ == nullptr) {
    fail({status, std::nullopt});
    return;
  }
  status = model_->decoder().decode(view_, request);
  if (!status.ok()) {
    fail({status, RejectReason::kInvalid});
    return;
  }
  priority = view_.priority;
  decode = context_.clock.now() - began_;
  model_->metrics().observe_stage(Stage::kDecode, seconds(decode));
  model_->submit(*this);
}

void PredictCall::answer(std::span<const OutputView> outputs, const StageTimings& timings) {
  const TimePoint encoding = context_.clock.now();
  const ResponseParts parts{.outputs = outputs,
                            .model_name = model_->name(),
                            .model_version = model_->version(),
                            .timings = timings};
  write_response(parts, begin_reply(response_bytes(parts)));
  const TimePoint encoded = context_.clock.now();
  model_->metrics().observe_stage(Stage::kEncode, seconds(encoded - encoding));
  if (cancelled.load(std::memory_order_relaxed)) {
    count(ended_by_deadline(encoded, arrival, deadline) ? Code::kDeadlineExceeded : Code::kCancelled);
  } else {
    count(Code::kOk);
  }
  send_reply();
}

void PredictCall::fail(const Refusal& refusal) {
  ModelMetrics& metrics = model_ == nullptr ? context_.unresolved : model_->metrics();
  if (refusal.reason.has_value()) metrics.count_rejected(*refusal.reason);
  count(refusal.status.code);
  refuse(refusal.status);
}

void PredictCall::count(Code code) {
  ModelMetrics& metrics = model_ == nullptr ? context_.unresolved : model_->metrics();
  const Duration took = context_.clock.now() - began_;
  metrics.count_request(code, seconds(took));
  if (context_.log.debugs()) {
    context_.log.debug(
        "request",
        {{"model", metrics.model},
         {"code", std::string(code_name(code))},
         {"duration_us",
          std::chrono::duration_cast<std::chrono::microseconds>(took).count()}});
  }
}

void PredictCall::hand_over() { handed_over_.store(true, std::memory_order_release); }

void PredictCall::leave() {
  handed_over_.exchange(false, std::memory_order_acquire);
  if (!inside_) return;
  inside_ = false;
  context_.gate.leave();
}

}  // namespace tessera
