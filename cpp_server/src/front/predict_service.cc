#include "front/predict_service.h"

#include <new>
#include <utility>

#include "common/text.h"

namespace tessera {
namespace {

// The label under which it is counted that a request's tensors were refused with `status`.
RejectReason reason_of(const Status& status) {
  return status.code == Code::kResourceExhausted ? RejectReason::kQueueFull
                                                 : RejectReason::kInvalid;
}

}  // namespace

void PredictCall::start(Bytes message) {
  began_ = context_.clock.now();
  held_bytes_ = 0;
  decoded_ = false;
  begin_record();
  expect_parts(1, 0);
  inside_ = context_.admission.enter();
  if (!inside_) {
    model_ = named_model(message);
    fail({{Code::kUnavailable, "the server is draining"}, RejectReason::kDraining});
    return;
  }
  try {
    parse_and_submit(message);
  } catch (const std::bad_alloc&) {
    context_.log.client_warning("out_of_memory",
                                {{"message_bytes", static_cast<std::int64_t>(message.size())}});
    free_memory();
    fail(out_of_memory_refusal());
  }
}

void PredictCall::begin_record() {
  told_ = false;
  if (context_.observer == nullptr) return;
  try {
    if (record_ == nullptr) record_ = std::make_unique<CallRecord>();
    if (!context_.observer->begin(trace_header(), *record_)) return;
    record_->timings.reset();
    record_->method = protocol_->method_name();
    tell_origin(*record_);
    told_ = true;
  } catch (const std::bad_alloc&) {  // the call goes on
    context_.observer->drop();
  }
}

// Keeps the message for a replay, if the call is one of the share that is recorded.
void PredictCall::record_request(Bytes message) {
  if (context_.observer == nullptr) return;
  RequestRecorder* const recorder = context_.observer->recorder();
  if (recorder == nullptr) return;
  try {
    CallRecord own;
    if (!told_) tell_origin(own);
    const CallRecord& origin = told_ ? *record_ : own;
    recorder->put(
        began_,
        {.method = protocol_->method_name() == "Predict" ? RecordedMethod::kPredict
                                                         : RecordedMethod::kModelInfer,
         .protocol = origin.protocol == "rest" ? RecordedProtocol::kRest : RecordedProtocol::kGrpc,
         .model = model_->name(),
         .version = model_->version(),
         .request_id = origin.request_id,
         .message = {reinterpret_cast<const char*>(message.data()), message.size()}});
  } catch (const std::bad_alloc&) {  // the call goes on
    recorder->drop();
  }
}

// The model that `message` names, for the counts of a call that is refused whatever it asks for;
// null: there is none, or the message cannot be read.
std::shared_ptr<ServedModel> PredictCall::named_model(Bytes message) {
  try {
    Status status;
    std::string_view key;
    if (!protocol_->parse(message) || !protocol_->read_traffic_key(key).ok()) return nullptr;
    if (key.empty()) key = caller();
    return context_.registry.find(protocol_->model_name(), protocol_->model_version(), key, status);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Throws std::bad_alloc, and has neither answered nor submitted the call then.
void PredictCall::parse_and_submit(Bytes message) {
  const Clock& clock = context_.clock;
  if (!protocol_->parse(message)) {
    fail({Status::invalid(text("the message (", message.size(), " bytes) is not a valid ",
                               protocol_->message_name())),
          RejectReason::kInvalid});
    return;
  }
  std::string_view key;
  Status status = protocol_->read_traffic_key(key);
  if (!status.ok()) {
    fail({status, RejectReason::kInvalid});
    return;
  }
  if (key.empty()) key = caller();
  // A share of our own: the call may have been answered, and its share given up, before submit has
  // returned.
  const std::shared_ptr<ServedModel> model =
      context_.registry.find(protocol_->model_name(), protocol_->model_version(), key, status);
  model_ = model;
  if (model == nullptr) {
    fail({status, std::nullopt});
    return;
  }
  status = protocol_->decode(*model_, began_, *this);
  if (!status.ok()) {
    fail({status, reason_of(status)});
    return;
  }
  decoded_ = true;
  record_request(message);
  if (!hold(message.size())) return;
  decode = context_.clock.now() - began_;
  model->metrics().observe_stage(Stage::kDecode, seconds(decode));
  keep_some(message);
  std::unique_ptr<ShadowCall> shadow = copy_for_shadow(message, key);
  if (shadow != nullptr) comparison_ = shadow->comparison();
  submit_to(model);
  // Only now: the client's answer comes first. The message may be gone, and so may this call.
  if (shadow != nullptr) ShadowCall::compute(std::move(shadow), clock);
}

// Keeps the message for the warm-up of a next version, if it is one of those that are kept.
void PredictCall::keep_some(Bytes message) {
  if (context_.recent == nullptr || !RecentRequests::due()) return;
  try {
    context_.recent->add(model_->name(), message, *protocol_);
  } catch (const std::bad_alloc&) {  // the client's call goes on
    context_.log.client_warning("request_not_kept");
  }
}

// The copy of the message that a shadow of the model is to compute; null: none is.
std::unique_ptr<ShadowCall> PredictCall::copy_for_shadow(Bytes message, std::string_view key) {
  if (context_.shadows == nullptr) return nullptr;
  try {
    std::shared_ptr<ServedModel> shadow = context_.registry.shadow(model_->name(), key);
    if (shadow == nullptr || shadow == model_) return nullptr;
    auto metrics = context_.shadows->of(model_->name(), model_->version(), shadow->version());
    return ShadowCall::copy(message, *protocol_, std::move(shadow), std::move(metrics),
                            context_.budget);
  } catch (const std::bad_alloc&) {  // the client's call goes on
    return nullptr;
  }
}

// Takes what the request will hold until its answer has left; otherwise it has been refused.
bool PredictCall::hold(std::size_t message_bytes) {
  const std::int64_t bytes =
      RequestBytes::kCall +
      static_cast<std::int64_t>(message_bytes + protocol_->copied_bytes(*model_, request)) +
      model_->request_bytes().samples_bytes(request.samples);
  ByteBudget& budget = context_.budget;
  if (bytes > budget.limit()) {
    fail({Status::invalid(text("the request takes ", bytes, " bytes in the server, the limit is ",
                               budget.limit())),
          RejectReason::kInvalid});
    return false;
  }
  ByteShare& share = connection_share();
  if (!share.take(bytes)) {
    fail({{Code::kResourceExhausted,
           text("the connection has its share: requests and answers of it take ", share.held(),
                " bytes (limit ", share.most(), "), this request brings ", bytes,
                "; try again later")},
          RejectReason::kQueueFull});
    return false;
  }
  if (!budget.take(bytes)) {
    share.give(bytes);
    fail({{Code::kResourceExhausted, text("the server is full: requests and answers in it take ",
                                          budget.held(), " bytes (limit ", budget.limit(),
                                          "), this request brings ", bytes, "; try again later")},
          RejectReason::kQueueFull});
    return false;
  }
  held_bytes_ = bytes;
  return true;
}

void PredictCall::give_back(std::int64_t bytes) {
  held_bytes_ -= bytes;
  context_.budget.give(bytes);
  connection_share().give(bytes);
}

void PredictCall::answer(std::span<const OutputView> outputs, const StageTimings& timings) {
  if (const auto comparison = std::exchange(comparison_, nullptr)) {
    try {
      comparison->computed(outputs);
    } catch (const std::bad_alloc&) {
      comparison->ended(ShadowResult::kDropped);
    }
  }
  const TimePoint encoding = context_.clock.now();
  const ResponseParts parts{
      .outputs = outputs,
      .model_name = model_->name(),
      .model_version = model_->version(),
      .timings = timings,
      .commit = model_->commit_lock() == nullptr ? std::nullopt : std::optional(commit())};
  if (!cancelled.load(std::memory_order_relaxed)) {
    const Status status = protocol_->write_elsewhere(parts);
    if (!status.ok()) {
      fail({status, reason_of(status)});
      return;
    }
  }
  const std::size_t bytes = protocol_->response_bytes(parts);
  std::byte* reply = nullptr;
  try {
    reply = begin_reply(bytes);
  } catch (const std::bad_alloc&) {
    fail(out_of_memory_refusal());
    return;
  }
  protocol_->write(parts, reply);
  protocol_->end_call();
  const TimePoint encoded = context_.clock.now();
  model_->metrics().observe_stage(Stage::kEncode, seconds(encoded - encoding));
  if (told_) {
    record_->timings = timings;
    record_->encode = encoded - encoding;
  }
  if (cancelled.load(std::memory_order_relaxed)) {
    count(ended_by_deadline(encoded, arrival, deadline) ? Code::kDeadlineExceeded
                                                        : Code::kCancelled);
  } else {
    count(Code::kOk);
    model_->metrics().count_answered(request.samples, encoded);
  }
  const std::int64_t left = RequestBytes::kCall + static_cast<std::int64_t>(bytes);
  if (release_request() && left < held_bytes_) {
    give_back(held_bytes_ - left);
  }
  model_.reset();  // a client that reads slowly does not keep an old version in memory
  send_reply();
}

void PredictCall::fail(const Refusal& refusal) {
  if (const auto comparison = std::exchange(comparison_, nullptr)) {
    comparison->ended(ShadowResult::kDropped);
  }
  ModelMetrics& metrics = model_ == nullptr ? context_.unresolved : model_->metrics();
  if (refusal.reason.has_value()) metrics.count_rejected(*refusal.reason);
  if (told_) record_->timings.reset();
  count(refusal.status.code);
  protocol_->end_call();
  release_request();
  model_.reset();
  refuse(refusal.status);
}

void PredictCall::count(Code code) {
  ModelMetrics& metrics = model_ == nullptr ? context_.unresolved : model_->metrics();
  const Duration took = context_.clock.now() - began_;
  metrics.count_request(code, took);
  tell(metrics, code, took);
  if (context_.log.debugs()) {
    context_.log.debug(
        "request",
        {{"model", metrics.model},
         {"code", std::string(code_name(code))},
         {"duration_us", std::chrono::duration_cast<std::chrono::microseconds>(took).count()}});
  }
}

void PredictCall::tell(const ModelMetrics& metrics, Code code, Duration took) {
  if (!told_) return;
  record_->model = metrics.model;
  record_->version = metrics.version;
  record_->samples = decoded_ ? request.samples : 0;
  record_->ids = decoded_ ? request.ids : 0;
  record_->code = code;
  record_->http_status = http_status(code);
  record_->took = took;
  context_.observer->tell(*record_);
}

void PredictCall::count_refused(const Status& status) {
  decoded_ = false;
  begin_record();
  if (status.code == Code::kResourceExhausted) {
    context_.unresolved.count_rejected(RejectReason::kQueueFull);
  } else if (status.code == Code::kInvalidArgument) {
    context_.unresolved.count_rejected(RejectReason::kInvalid);
  } else if (status.code == Code::kDeadlineExceeded) {
    context_.unresolved.count_rejected(RejectReason::kDeadline);
  }
  context_.unresolved.count_request(status.code, Duration::zero());
  tell(context_.unresolved, status.code, Duration::zero());
}

void PredictCall::leave() {
  if (held_bytes_ > 0) give_back(held_bytes_);
  if (!inside_) return;
  inside_ = false;
  context_.admission.leave();
}

}  // namespace tessera
