#include "http2/request_head.h"

#include <optional>

#include "common/text.h"

namespace tessera::http2 {
namespace {

// RFC 9113, section 6.5.2.
constexpr std::size_t kEntryBytes = 32;
constexpr std::size_t kQuotedBytes = 200;
constexpr int kMethodNotAllowed = 405;
constexpr int kUnsupportedMediaType = 415;

}  // namespace

void RequestHead::clear() {
  bytes_ = 0;
  post_ = grpc_ = trailers_ = false;
  method_ = nullptr;
  encoding_ = Encoding::kIdentity;
  request_id_.clear();
  traceparent_.clear();
  authorization_.clear();
  unknown_path_.clear();
  unknown_encoding_.clear();
  timeout_.clear();
}

void RequestHead::add(std::string_view name, std::string_view value, const MethodTable& methods) {
  bytes_ += name.size() + value.size() + kEntryBytes;
  if (name == ":path") {
    method_ = methods.find(value);
    if (method_ == nullptr) unknown_path_ = value.substr(0, kQuotedBytes);
  } else if (name == ":method") {
    post_ = value == "POST";
  } else if (name == "content-type") {
    grpc_ = is_grpc_content(value);
  } else if (name == "te") {
    trailers_ = value == "trailers";
  } else if (name == "x-request-id") {
    if (request_id_.empty()) request_id_ = value.substr(0, kMaxRequestIdBytes);
  } else if (name == "traceparent") {
    if (traceparent_.empty()) traceparent_ = value.substr(0, kMaxTraceParentBytes);
  } else if (name == "authorization") {
    if (authorization_.empty()) authorization_ = value;
  } else if (name == "grpc-timeout") {
    timeout_ = value.substr(0, kQuotedBytes);
  } else if (name == "grpc-encoding") {
    const std::optional<Encoding> known = encoding_of(value);
    if (known.has_value()) encoding_ = *known;
    if (!known.has_value()) unknown_encoding_ = text("'", value.substr(0, kQuotedBytes), "'");
  }
}

int RequestHead::http_status() const {
  if (!post_) return kMethodNotAllowed;
  return grpc_ ? 0 : kUnsupportedMediaType;
}

Status RequestHead::check(TimePoint now, TimePoint& deadline) const {
  if (method_ == nullptr) {
    return {Code::kUnimplemented, text("this server has no method '", unknown_path_, "'")};
  }
  if (!trailers_) {
    return Status::invalid(
        "the header te is not 'trailers': something between client and server "
        "does not pass trailers on");
  }
  if (!unknown_encoding_.empty()) {
    return {Code::kUnimplemented,
            text("grpc-encoding is ", unknown_encoding_, ", expected one of ", kAcceptedEncodings)};
  }
  deadline = kNever;
  if (timeout_.empty()) return {};
  const std::optional<TimePoint> parsed = deadline_after(now, timeout_);
  if (!parsed.has_value()) {
    return Status::invalid(text("grpc-timeout is '", timeout_,
                                "', expected up to eight digits and a unit of H, M, S, m, u, n"));
  }
  deadline = *parsed;
  return {};
}

}  // namespace tessera::http2
