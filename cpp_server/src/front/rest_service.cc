#include "front/rest_service.h"

#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "common/text.h"
#include "common/thread_name.h"
#include "front/repository_http.h"
#include "front/rest_pages.h"
#include "front/rest_request.h"
#include "front/rest_response.h"
#include "observe/request_ids.h"
#include "request/utf8.h"

namespace tessera {
namespace {

constexpr std::string_view kInfer = "infer";
constexpr int kGzipFormat = 16;  // added to the window's bits (zlib.h, inflateInit2)
constexpr std::size_t kStepBytes = 64 * 1024;

HttpAnswer refusal_of(const Status& status) {
  return json_refusal(http_status_of(status.code), status.message);
}

// The form of a path that read_model_path takes; docs/openapi.yaml has both.
std::string_view route_of(const std::string& path) {
  const auto model = read_model_path(path);
  return !model.has_value() || model->version.empty()
             ? "/v2/models/{name}/infer"
             : "/v2/models/{name}/versions/{version}/infer";
}

// What is wrong with a request before its message is there: HTTP's status and a sentence; status 0:
// nothing.
struct BadRequest {
  int status = 0;
  std::string why;
};

// Unpacks `body`, of `encoding`, into itself.
BadRequest unpack(std::string_view encoding, std::size_t most_bytes, std::string& body) {
  z_stream stream{};
  const int format = encoding == "gzip" ? kGzipFormat : 0;
  if (::inflateInit2(&stream, MAX_WBITS + format) != Z_OK) throw std::bad_alloc();
  const std::unique_ptr<z_stream, int (*)(z_stream*)> owner(&stream, ::inflateEnd);
  stream.next_in = reinterpret_cast<Bytef*>(body.data());
  stream.avail_in = static_cast<uInt>(body.size());
  std::string made;
  int result = Z_OK;
  while (result == Z_OK && made.size() <= most_bytes) {
    const std::size_t before = made.size();
    made.resize(before + kStepBytes);
    stream.next_out = reinterpret_cast<Bytef*>(made.data() + before);
    stream.avail_out = static_cast<uInt>(kStepBytes);
    result = ::inflate(&stream, Z_NO_FLUSH);
    made.resize(before + kStepBytes - stream.avail_out);
  }
  if (made.size() > most_bytes) {
    return {413, text("the body unpacks to more than ", most_bytes, " bytes, the limit")};
  }
  if (result != Z_STREAM_END || stream.avail_in > 0) {
    return {400, text("the body (", body.size(), " bytes) is not valid ", encoding)};
  }
  body = std::move(made);
  return {};
}

BadRequest read_json_bytes(const std::string& given, std::optional<std::size_t>& bytes) {
  if (given.empty()) return {};
  constexpr std::size_t kMostDigits = 18;
  std::size_t number = 0;
  const bool digits = given.size() <= kMostDigits &&
                      std::all_of(given.begin(), given.end(),
                                  [](char digit) { return digit >= '0' && digit <= '9'; });
  if (!digits) return {400, "Inference-Header-Content-Length is not a number"};
  std::from_chars(given.data(), given.data() + given.size(), number);
  bytes = number;
  return {};
}

}  // namespace

// It lives as long as somebody works on it or its answer has not left.
class RestCall final : public PredictCall,
                       public HttpCall,
                       public std::enable_shared_from_this<RestCall> {
 public:
  RestCall(RestService& service, HttpRequest asked, HttpDone done)
      : PredictCall(service.context_, make_infer_protocol(service.context_.shared_memory)),
        service_(service),
        share_(service.context_.budget.limit() / kConnectionShare),
        asked_(std::move(asked)),
        done_(std::move(done)) {}
  ~RestCall() override { leave(); }

  void cancel() override { cancelled.store(true, std::memory_order_relaxed); }

  void refuse_stopped() { give(refusal_of({Code::kUnavailable, "the server is draining"})); }

  // What comes next: reading the body, or writing the answer. On the service's thread, or where
  // that has ended.
  void work() {
    if (answered_) {
      give(answer_of_reply());
    } else {
      read();
    }
  }

  std::shared_ptr<RestCall> next;  // behind it in the service's queue

 private:
  void read() {
    try {
      const Status status = read_message();
      if (done_ == nullptr) return;
      if (!status.ok()) {
        count_refused(status);
        give(refusal_of(status));
        return;
      }
    } catch (const std::bad_alloc&) {
      const Status status = out_of_memory_refusal().status;
      count_refused(status);
      give(refusal_of(status));
      return;
    }
    self_ = shared_from_this();
    start(std::as_bytes(std::span(request_.message)));
  }

  // PredictCall
  std::byte* begin_reply(std::size_t bytes) override {
    reply_.resize(bytes);
    return reinterpret_cast<std::byte*>(reply_.data());
  }
  void send_reply() override {
    const auto self = std::move(self_);
    answered_ = true;
    if (!service_.post(self)) work();
  }
  void refuse(const Status& status) override {
    const auto self = std::move(self_);
    give(refusal_of(status));
  }
  std::string_view caller() override { return caller_; }
  std::string_view trace_header() override { return asked_.head.traceparent; }
  void tell_origin(CallRecord& record) override {
    record.protocol = "rest";
    record.route = route_of(asked_.head.path);
    record.peer = asked_.peer;
    choose_request_id(asked_.head.request_id, record.request_id);
  }
  int http_status(Code code) const override {
    if (unfit_status_ != 0) return unfit_status_;
    return code == Code::kOk ? HttpAnswer().status : http_status_of(code);
  }
  void submit_to(const std::shared_ptr<ServedModel>& model) override { model->submit(*this); }
  ByteShare& connection_share() override { return share_; }
  bool release_request() override {
    request_.message = std::string();
    free_memory();
    return true;
  }

  // Makes the message of the body; a status, or an answer that has been given.
  Status read_message() {
    const std::shared_ptr<void> held = std::exchange(asked_.held, nullptr);
    std::string body = std::move(asked_.body);
    const HttpHead& head = asked_.head;
    caller_ =
        head.request_id.empty() ? asked_.peer : head.request_id.substr(0, kMostRequestIdBytes);
    std::optional<std::size_t> json_bytes;
    BadRequest bad = read_json_bytes(head.json_bytes, json_bytes);
    const bool packed = !head.encoding.empty() && head.encoding != "identity";
    if (packed && head.encoding != "gzip" && head.encoding != "deflate" && bad.status == 0) {
      bad = {400, text("Content-Encoding is '", head.encoding, "', expected gzip or deflate")};
    }
    if (bad.status == 0 && packed) {
      bad = unpack(head.encoding, service_.max_body_bytes_, body);
      unfit_status_ = bad.status;
      if (bad.status != 0) count_refused(Status::invalid(bad.why));
    }
    if (bad.status != 0) {
      give(json_refusal(bad.status, bad.why));
      return {};
    }
    const auto model = read_model_path(head.path);
    if (!is_utf8(model->name) || !is_utf8(model->version)) {
      give(json_refusal(404, "the path is not UTF-8"));
      return {};
    }
    return read_rest_request(body, json_bytes, *model, request_);
  }

  HttpAnswer answer_of_reply() {
    try {
      return rest_answer(reply_, request_.encodings);
    } catch (const std::bad_alloc&) {
      return refusal_of(out_of_memory_refusal().status);
    }
  }

  void give(HttpAnswer answer) {
    answer.held = shared_from_this();
    if (record() != nullptr && record()->logged) answer.request_id = record()->request_id;
    const HttpDone done = std::exchange(done_, nullptr);
    done(std::move(answer));
  }

  RestService& service_;
  ByteShare share_;  // its connection has no other call
  HttpRequest asked_;
  HttpDone done_;  // null: the answer has been given
  std::string caller_;
  RestRequest request_;
  std::string reply_;
  int unfit_status_ = 0;            // of a body that cannot be unpacked
  bool answered_ = false;           // reply_ is there
  std::shared_ptr<RestCall> self_;  // while PredictCall has it
};

RestService::RestService(const PredictContext& context, std::size_t max_body_bytes)
    : context_(context), max_body_bytes_(max_body_bytes), thread_([this] { run(); }) {}

RestService::~RestService() { stop(); }

bool RestService::answers(const std::string& path) {
  const auto asked = read_model_path(path);
  return asked.has_value() && asked->verb == kInfer;
}

std::shared_ptr<HttpCall> RestService::begin(HttpRequest request, HttpDone done) {
  auto call = std::make_shared<RestCall>(*this, std::move(request), std::move(done));
  if (post(call)) return call;
  call->refuse_stopped();
  return nullptr;
}

bool RestService::post(const std::shared_ptr<RestCall>& call) {
  const MutexLock lock(mutex_);
  if (stopped_) return false;
  if (last_ == nullptr) {
    first_ = call;
  } else {
    last_->next = call;
  }
  last_ = call.get();
  came_.notify_one();
  return true;
}

void RestService::stop() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
    came_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void RestService::run() {
  name_thread("rest");
  while (true) {
    std::shared_ptr<RestCall> call;
    {
      const MutexLock lock(mutex_);
      while (first_ == nullptr && !stopped_) came_.wait(mutex_);
      if (first_ == nullptr) return;
      call = std::move(first_);
      first_ = std::move(call->next);
      if (first_ == nullptr) last_ = nullptr;
    }
    call->work();
  }
}

}  // namespace tessera
