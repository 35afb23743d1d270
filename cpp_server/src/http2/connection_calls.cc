// The part of a connection that knows calls: what the session tells of streams, and answers.
// connection_messages.cc has their messages.
#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string>

#include "common/text.h"
#include "http2/connection.h"
#include "http2/grpc_wire.h"
#include "http2/session_callbacks.h"

namespace tessera::http2 {
namespace {

constexpr std::string_view kContentType = "application/grpc";
// nghttp2 copies what it is given, and does not remember it for the next block.
constexpr int kVarying = NGHTTP2_NV_FLAG_NO_INDEX;

std::string_view outcome_text(const Status& status, std::string& digits) {
  if (status.ok()) return "0";
  digits = std::to_string(static_cast<int>(status.code));
  return digits;
}

}  // namespace

// The session has opened a stream, whether or not its headers will turn out to be a request.
int Connection::on_begin_headers(const nghttp2_frame& frame) {
  head_.clear();
  block_begun_ = context_.loop.now();
  if (frame.headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
  context_.counters.streams.fetch_add(1, std::memory_order_relaxed);
  ++streams_;
  return 0;
}

int Connection::on_header(std::string_view name, std::string_view value) {
  head_.add(name, value, context_.methods);
  const bool fits = head_.bytes() <= static_cast<std::size_t>(context_.limits.max_header_bytes);
  return fits ? 0 : fail(CloseReason::kHeaderBytes);
}

int Connection::on_frame(const nghttp2_frame& frame) {
  const bool ends = (frame.hd.flags & NGHTTP2_FLAG_END_STREAM) != 0;
  switch (frame.hd.type) {
    case NGHTTP2_HEADERS:
      block_begun_ = kNever;
      if (frame.headers.cat == NGHTTP2_HCAT_REQUEST) return begin_call(frame.hd.stream_id, ends);
      return ends ? messages_ended(frame.hd.stream_id) : 0;
    case NGHTTP2_DATA: return ends ? messages_ended(frame.hd.stream_id) : 0;
    case NGHTTP2_SETTINGS: handshaken_ = true; return 0;
    case NGHTTP2_GOAWAY: client_leaves_ = true; return 0;
    default: return 0;
  }
}

int Connection::begin_call(std::int32_t stream, bool ended) {
  const TimePoint now = context_.loop.now();
  if (const int status = head_.http_status(); status != 0) {
    submit_http_status(stream, status);
    return resets_.take(now) ? 0 : fail(CloseReason::kResets);
  }
  if (context_.gate != nullptr && head_.guarded()) {
    const Status status = context_.gate->admit(head_.authorization());
    // Who has a token and calls too often is refused, and keeps the connection.
    const bool counted = status.code == Code::kUnauthenticated;
    if (!status.ok()) return refuse_unheard(stream, status, counted);
  }
  TimePoint deadline = kNever;
  if (const Status status = head_.check(now, deadline); !status.ok()) {
    return refuse_unheard(stream, status, /*counted=*/true);
  }
  Call& call = head_.method()->begin(context_.loop);
  open(call, stream, deadline);
  if (streams_ > kOwnStreams && context_.counters.streams.load() > context_.limits.max_streams) {
    context_.counters.note_full_of_calls(now);
    refuse(call, {Code::kResourceExhausted,
                  text("the server is full: it has ", context_.limits.max_streams,
                       " calls open; try again later")});
  } else if (ended) {
    messages_ended(stream);
  }
  return 0;
}

// Refuses a call of which nothing but the headers is looked at.
int Connection::refuse_unheard(std::int32_t stream, const Status& status, bool counted) {
  submit_status(stream, status, /*only=*/true, /*request_id=*/{});
  return !counted || resets_.take(context_.loop.now()) ? 0 : fail(CloseReason::kResets);
}

void Connection::open(Call& call, std::int32_t stream, TimePoint deadline) {
  call.connection_ = this;
  call.stream_ = stream;
  call.bytes_ = bytes_;
  call.encoding_ = head_.encoding();
  call.opened_ = context_.loop.now();
  call.deadline_ = deadline;
  call.request_id_ = head_.request_id();
  call.traceparent_ = head_.traceparent();
  call.reading_ = true;
  call.previous_ = nullptr;
  call.next_call_ = calls_;
  if (calls_ != nullptr) calls_->previous_ = &call;
  calls_ = &call;
  nghttp2_session_set_stream_user_data(session_.get(), stream, &call);
}

void Connection::unlink(Call& call) {
  (call.previous_ == nullptr ? calls_ : call.previous_->next_call_) = call.next_call_;
  if (call.next_call_ != nullptr) call.next_call_->previous_ = call.previous_;
  call.previous_ = call.next_call_ = nullptr;
  if (packed_.empty()) return;
  if (packed_.front() == &call) unpacker_.reset();
  std::erase(packed_, &call);
}

Call* Connection::call_of(std::int32_t stream) const {
  return static_cast<Call*>(nghttp2_session_get_stream_user_data(session_.get(), stream));
}

void Connection::answer(Call& call) {
  context_.loop.defer(*this);
  call.answered_ = context_.loop.now();
  if (call.submitted_) {
    nghttp2_session_resume_data(session_.get(), call.stream_);
    return;
  }
  call.submitted_ = true;
  if (call.finished_ && !call.status_.ok()) {
    call.done_ = true;
    submit_status(call.stream_, call.status_, /*only=*/true, call.told_id_);
    return;
  }
  const std::array<nghttp2_nv, 3> headers = {header(":status", "200"),
                                             header("content-type", kContentType),
                                             header("grpc-accept-encoding", kAcceptedEncodings)};
  const nghttp2_data_provider source = answer_source(call);
  nghttp2_submit_response(session_.get(), call.stream_, headers.data(), headers.size(), &source);
}

// Submits a status behind an answer, or alone.
void Connection::submit_status(std::int32_t stream, const Status& status, bool only,
                               std::string_view request_id) {
  std::string digits;
  std::array<nghttp2_nv, 6> headers;
  std::size_t count = 0;
  if (only) {
    headers[count++] = header(":status", "200");
    headers[count++] = header("content-type", kContentType);
    headers[count++] = header("grpc-accept-encoding", kAcceptedEncodings);
  }
  headers[count++] =
      header("grpc-status", outcome_text(status, digits), status.ok() ? NGHTTP2_NV_FLAG_NONE : 0);
  const std::string message = percent_encoded(status.message);
  if (!status.ok()) headers[count++] = header("grpc-message", message, kVarying);
  if (!request_id.empty()) headers[count++] = header("x-request-id", request_id, kVarying);
  if (only) {
    nghttp2_submit_response(session_.get(), stream, headers.data(), count, nullptr);
  } else {
    nghttp2_submit_trailer(session_.get(), stream, headers.data(), count);
  }
}

void Connection::submit_http_status(std::int32_t stream, int status) {
  const std::string digits = std::to_string(status);
  const std::array<nghttp2_nv, 1> headers = {header(":status", digits, NGHTTP2_NV_FLAG_NONE)};
  nghttp2_submit_response(session_.get(), stream, headers.data(), headers.size(), nullptr);
}

ssize_t Connection::take_answer(Call& call, std::span<std::byte> into, std::uint32_t& flags) {
  const std::span<const std::byte> left = call.answer_.bytes().subspan(call.sent_);
  const std::size_t now = std::min(left.size(), into.size());
  if (now > 0) std::memcpy(into.data(), left.data(), now);
  call.sent_ += now;
  if (now < left.size()) return static_cast<ssize_t>(now);
  if (call.finished_) {
    call.done_ = true;
    flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
    submit_status(call.stream_, call.status_, /*only=*/false, call.told_id_);
  } else if (now == 0) {
    return NGHTTP2_ERR_DEFERRED;
  }
  return static_cast<ssize_t>(now);
}

int Connection::on_frame_sent(const nghttp2_frame& frame) {
  if (frame.hd.type != NGHTTP2_HEADERS || (frame.hd.flags & NGHTTP2_FLAG_END_STREAM) == 0) return 0;
  control_frames_.give(kFramesPerAnswer);
  pings_.give(kFramesPerAnswer);
  const std::int32_t stream = frame.hd.stream_id;
  if (nghttp2_session_get_stream_remote_close(session_.get(), stream) == 0) {
    // What the client is still sending of the call has no reader any more.
    nghttp2_submit_rst_stream(session_.get(), NGHTTP2_FLAG_NONE, stream, NGHTTP2_NO_ERROR);
  }
  return 0;
}

int Connection::on_stream_closed(std::int32_t stream) {
  Call* const call = call_of(stream);
  --streams_;
  context_.counters.streams.fetch_sub(1, std::memory_order_relaxed);
  if (streams_ == 0) idle_since_ = context_.loop.now();
  if (call != nullptr) {
    unlink(*call);
    call->closed();
  }
  return 0;
}

// False: an answer is not being read.
bool Connection::sweep_calls(TimePoint now, bool full) {
  const auto allowed = [&](Duration limit, std::size_t bytes) {
    const auto on_top = std::chrono::seconds(static_cast<std::int64_t>(bytes) / kLeastBytesPerS);
    return (full ? std::min(limit, kFullTimeout) : limit) + on_top;
  };
  for (Call* call = calls_; call != nullptr;) {
    Call& one = *call;
    call = call->next_call_;
    const bool in_message = one.kind_ == Call::Kind::kUnary || !one.reader_.empty();
    if (one.reading_ && in_message &&
        now - one.opened_ > allowed(context_.limits.message_timeout, one.reader_.received())) {
      refuse(one, {Code::kDeadlineExceeded,
                   text("of the message ", one.reader_.received(), " bytes have come in ",
                        std::chrono::duration_cast<std::chrono::seconds>(now - one.opened_).count(),
                        " s: it is too slow")});
      continue;
    }
    const bool waits = one.submitted_ && (one.finished_ || one.sent_ < one.answer_.size());
    if (waits && now - one.answered_ > allowed(context_.limits.write_timeout, one.sent_)) {
      return false;
    };
    const bool late = one.kind_ == Call::Kind::kStreaming && now > one.deadline_;
    if (late && !one.finished_ && !one.in_other_hands_) {
      one.reading_ = false;
      one.finish({Code::kDeadlineExceeded, "the deadline has passed"});
    }
  }
  return true;
}

}  // namespace tessera::http2
