#include "load/grpc_channel.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <new>
#include <utility>

#include "common/text.h"

namespace tessera {
namespace {

constexpr Duration kFirstPause = std::chrono::milliseconds(50);
constexpr Duration kLongestPause = std::chrono::seconds(1);
// What may be on its way to us: far more than calls of a second take.
constexpr std::int32_t kWindowBytes = 64 * 1024 * 1024;
constexpr std::size_t kWriteBytes = 256 * 1024;
constexpr std::size_t kPrefixBytes = 5;

enum Code : GrpcCode {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kDeadlineExceeded = 4,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kUnauthenticated = 16,
};

constexpr std::array<std::string_view, 17> kCodeNames = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

// The two tables of gRPC's protocol for calls that end without a status
// (doc/PROTOCOL-HTTP2.md, doc/http-grpc-status-mapping.md).
GrpcCode code_of_reset(std::uint32_t http2_error) {
  switch (http2_error) {
    case NGHTTP2_REFUSED_STREAM: return kUnavailable;
    case NGHTTP2_CANCEL: return kCancelled;
    case NGHTTP2_ENHANCE_YOUR_CALM: return kResourceExhausted;
    case NGHTTP2_INADEQUATE_SECURITY: return kPermissionDenied;
    default: return kInternal;
  }
}

GrpcCode code_of_http(int status) {
  switch (status) {
    case 400: return kInternal;
    case 401: return kUnauthenticated;
    case 403: return kPermissionDenied;
    case 404: return kUnimplemented;
    case 429:
    case 502:
    case 503:
    case 504: return kUnavailable;
    default: return kUnknown;
  }
}

// A timeout as gRPC writes it: at most eight digits and a unit.
std::string timeout_text(Duration timeout) {
  constexpr std::int64_t kMost = 99'999'999;
  const auto millis = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  if (millis <= kMost) return text(millis, "m");
  return text(std::min(std::chrono::ceil<std::chrono::seconds>(timeout).count(), kMost), "S");
}

int number_of(std::string_view digits) {
  int number = -1;
  std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return number;
}

bool is_message(std::string_view framed) {
  if (framed.size() < kPrefixBytes || framed[0] != 0) return false;
  std::size_t length = 0;
  for (std::size_t i = 1; i < kPrefixBytes; ++i) {
    length = length << 8U | static_cast<unsigned char>(framed[i]);
  }
  return framed.size() - kPrefixBytes == length;
}

}  // namespace

std::string_view grpc_code_name(GrpcCode code) {
  const auto index = static_cast<std::size_t>(code);
  return index < kCodeNames.size() ? kCodeNames[index] : kCodeNames[kUnknown];
}

std::string framed_message(std::string_view message) {
  std::string framed(1, '\0');
  for (int shift = 24; shift >= 0; shift -= 8) {
    framed.push_back(static_cast<char>(message.size() >> static_cast<unsigned>(shift)));
  }
  return framed.append(message);
}

// What nghttp2 tells of a connection. A stream whose call has ended already has none.
struct GrpcChannel::Callbacks {
  static GrpcChannel& channel(void* user) { return *static_cast<GrpcChannel*>(user); }

  static Call* call_of(nghttp2_session* session, std::int32_t stream) {
    return static_cast<Call*>(nghttp2_session_get_stream_user_data(session, stream));
  }

  static int on_header(nghttp2_session* session, const nghttp2_frame* frame,
                       const std::uint8_t* name, std::size_t name_bytes, const std::uint8_t* value,
                       std::size_t value_bytes, std::uint8_t /*flags*/, void* /*user*/) {
    Call* const call = call_of(session, frame->hd.stream_id);
    if (call == nullptr) return 0;
    const std::string_view key(reinterpret_cast<const char*>(name), name_bytes);
    const std::string_view content(reinterpret_cast<const char*>(value), value_bytes);
    if (key == ":status") {
      call->http_status = number_of(content);
    } else if (key == "grpc-status") {
      const int code = number_of(content);
      call->code = code < 0 ? static_cast<GrpcCode>(kUnknown) : code;
    } else if (key == "content-type") {
      call->other_content = !content.starts_with("application/grpc");
    }
    return 0;
  }

  static int on_data(nghttp2_session* session, std::uint8_t /*flags*/, std::int32_t stream,
                     const std::uint8_t* data, std::size_t bytes, void* /*user*/) {
    Call* const call = call_of(session, stream);
    if (call != nullptr) call->answer.append(reinterpret_cast<const char*>(data), bytes);
    return 0;
  }

  static int on_close(nghttp2_session* session, std::int32_t stream, std::uint32_t error,
                      void* user) {
    Call* const call = call_of(session, stream);
    if (call != nullptr) channel(user).finish(*call, channel(user).outcome(*call, error));
    return 0;
  }

  static int on_frame(nghttp2_session* /*session*/, const nghttp2_frame* frame, void* user) {
    GrpcChannel& self = channel(user);
    if (frame->hd.type == NGHTTP2_GOAWAY && self.state_ == State::kUp) {
      self.state_ = State::kLeaving;
    }
    return 0;
  }

  // How much of a message the next frame takes; `send_body` sends it.
  static ssize_t read_message(nghttp2_session* /*session*/, std::int32_t /*stream*/,
                              std::uint8_t* /*into*/, std::size_t room, std::uint32_t* flags,
                              nghttp2_data_source* source, void* /*user*/) {
    const Call& call = *static_cast<Call*>(source->ptr);
    const std::size_t bytes = std::min(room, call.framed.size() - call.sent);
    *flags |= NGHTTP2_DATA_FLAG_NO_COPY;
    if (call.sent + bytes == call.framed.size()) *flags |= NGHTTP2_DATA_FLAG_EOF;
    return static_cast<ssize_t>(bytes);
  }

  static int send_body(nghttp2_session* session, nghttp2_frame* frame, const std::uint8_t* head,
                       std::size_t bytes, nghttp2_data_source* /*source*/, void* user) {
    GrpcChannel& self = channel(user);
    if (self.outgoing_.waiting() >= kWriteBytes) return NGHTTP2_ERR_WOULDBLOCK;
    Call* const call = call_of(session, frame->hd.stream_id);
    if (call == nullptr) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;  // it ended: no more of it
    constexpr std::size_t kHeadBytes = 9;
    self.outgoing_.append(std::as_bytes(std::span(head, kHeadBytes)));
    self.outgoing_.refer(call->framed.subspan(call->sent, bytes));
    call->sent += bytes;
    return 0;
  }

  // As much of a message as the server takes in a frame.
  static ssize_t body_bytes(nghttp2_session* /*session*/, std::uint8_t /*type*/,
                            std::int32_t /*stream*/, std::int32_t connection_window,
                            std::int32_t stream_window, std::uint32_t longest, void* /*user*/) {
    return std::min<ssize_t>({connection_window, stream_window, longest});
  }
};

GrpcChannel::GrpcChannel(http2::EventLoop& loop, const Address& address, std::string path,
                         std::string authorization, http2::TlsContext tls, Duration timeout,
                         Caller& caller)
    : loop_(loop),
      address_(address),
      path_(std::move(path)),
      authorization_(std::move(authorization)),
      tls_(std::move(tls)),
      timeout_header_(timeout_text(timeout)),
      timeout_(timeout),
      caller_(caller),
      reconnect_([this] {
        reconnects_ = false;
        connect();
      }),
      deadline_([this] {
        watches_ = false;
        expire();
      }),
      pause_(kFirstPause) {}

GrpcChannel::~GrpcChannel() {
  loop_.cancel(reconnect_);
  loop_.cancel(deadline_);
  loop_.forget(*this);
  if (socket_.open()) loop_.remove(socket_.descriptor(), *this);
}

void GrpcChannel::call(std::span<const std::byte> framed, const CallTag& tag,
                       std::string_view path) {
  if (free_.empty()) {
    free_.emplace_back();
    free_.back().place = free_.begin();
  }
  active_.splice(active_.end(), free_, free_.begin());
  Call& call = active_.back();
  call.framed = framed;
  call.sent = 0;
  call.tag = tag;
  call.path = path;
  call.deadline = loop_.now() + timeout_;
  call.stream = -1;
  call.http_status = 0;
  call.code = -1;
  call.other_content = false;
  call.answer.clear();
  if (state_ == State::kUp) submit(call);
  if (state_ == State::kDown && !reconnects_) {
    reconnects_ = true;
    loop_.schedule(reconnect_, loop_.now());
  }
  watch_deadlines();
}

void GrpcChannel::submit(Call& call) {
  using http2::header;
  const std::array headers = {
      header(":method", "POST"),
      header(":scheme", tls_ == nullptr ? "http" : "https"),
      header(":path", call.path.empty() ? std::string_view(path_) : call.path),
      header(":authority", address_.text),
      header("te", "trailers"),
      header("content-type", "application/grpc"),
      header("user-agent", "tessera-load"),
      header("grpc-timeout", timeout_header_),
      header("authorization", authorization_)};
  const std::size_t count = headers.size() - (authorization_.empty() ? 1 : 0);
  nghttp2_data_provider body{};
  body.source.ptr = &call;
  body.read_callback = &Callbacks::read_message;
  call.stream =
      nghttp2_submit_request(session_.get(), nullptr, headers.data(), count, &body, &call);
  if (call.stream < 0) {
    // No stream can be begun on this connection any more: the call waits for the next one.
    call.stream = -1;
    state_ = State::kLeaving;
  }
  loop_.defer(*this);
}

void GrpcChannel::finish(Call& call, GrpcCode code) {
  if (session_ != nullptr && call.stream >= 0) {
    nghttp2_session_set_stream_user_data(session_.get(), call.stream, nullptr);
  }
  const std::string_view answer = call.answer;
  caller_.finished(call.tag, code, code == kOk ? answer.substr(kPrefixBytes) : "");
  free_.splice(free_.begin(), active_, call.place);
}

GrpcCode GrpcChannel::outcome(const Call& call, std::uint32_t http2_error) const {
  if (call.code > kOk) return call.code;
  if (call.code < 0) {
    if (http2_error != NGHTTP2_NO_ERROR) return code_of_reset(http2_error);
    return call.http_status == 200 && !call.other_content ? kUnknown
                                                          : code_of_http(call.http_status);
  }
  return is_message(call.answer) ? kOk : kInternal;
}

void GrpcChannel::connect() {
  http2::Socket socket(
      ::socket(address_.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const auto* const to = reinterpret_cast<const sockaddr*>(&address_.bytes);
  const bool begun = socket.open() && (::connect(socket.descriptor(), to, address_.length) == 0 ||
                                       errno == EINPROGRESS);
  if (!begun || !loop_.add(socket.descriptor(), EPOLLOUT, *this)) {
    connection_lost();
    return;
  }
  socket_ = std::move(socket);
  state_ = State::kConnecting;
}

void GrpcChannel::connected() {
  int error = 0;
  socklen_t length = sizeof(error);
  ::getsockopt(socket_.descriptor(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) {
    connection_lost();
    return;
  }
  const http2::CallbacksPointer callbacks = http2::make_callbacks();
  nghttp2_session_callbacks_set_on_header_callback(callbacks.get(), &Callbacks::on_header);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks.get(), &Callbacks::on_data);
  nghttp2_session_callbacks_set_on_stream_close_callback(callbacks.get(), &Callbacks::on_close);
  nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks.get(), &Callbacks::on_frame);
  nghttp2_session_callbacks_set_send_data_callback(callbacks.get(), &Callbacks::send_body);
  nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks.get(),
                                                                 &Callbacks::body_bytes);
  nghttp2_session* made = nullptr;
  if (nghttp2_session_client_new(&made, callbacks.get(), this) != 0) throw std::bad_alloc();
  session_.reset(made);
  // Without the priorities of RFC 7540 nghttp2 sends the bodies of calls one after the other. With
  // them it sends a frame of each in turn, so that of calls that wait to be sent none arrives
  // before nearly all have, and the server holds a part of each.
  const std::array<nghttp2_settings_entry, 3> settings = {
      {{NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
       {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kWindowBytes},
       {NGHTTP2_SETTINGS_NO_RFC7540_PRIORITIES, 1}}};
  nghttp2_submit_settings(made, NGHTTP2_FLAG_NONE, settings.data(), settings.size());
  nghttp2_session_set_local_window_size(made, NGHTTP2_FLAG_NONE, 0, kWindowBytes);
  if (tls_ != nullptr) {
    const std::string host = address_.text.substr(0, address_.text.rfind(':'));
    const bool brackets = host.starts_with('[');
    socket_.start_tls(tls_, http2::TlsSession::Role::kClient,
                      brackets ? host.substr(1, host.size() - 2) : host);
  }
  state_ = State::kUp;
  pause_ = kFirstPause;
  watched_ = EPOLLIN;
  loop_.change(socket_.descriptor(), EPOLLIN, *this);
  for (Call& call : active_) {
    if (call.stream < 0 && state_ == State::kUp) submit(call);
  }
  loop_.defer(*this);
}

void GrpcChannel::connection_lost() {
  const bool was_up = session_ != nullptr;
  if (socket_.open()) loop_.remove(socket_.descriptor(), *this);
  socket_ = {};
  session_ = nullptr;
  outgoing_.clear();
  state_ = State::kDown;
  // What is begun now waits for the next connection, with the pause that a refused one has.
  Calls ended;
  ended.swap(active_);
  loop_.schedule(reconnect_, loop_.now() + (was_up ? kFirstPause : pause_));
  if (!was_up) pause_ = std::min(2 * pause_, kLongestPause);
  reconnects_ = true;
  while (!ended.empty()) {
    active_.splice(active_.end(), ended, ended.begin());
    active_.back().stream = -1;
    finish(active_.back(), kUnavailable);
  }
}

void GrpcChannel::on_ready(std::uint32_t events) {
  if (state_ == State::kConnecting) {
    connected();
    return;
  }
  if ((events & EPOLLOUT) != 0) socket_.push();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
    receive();
  } else {
    loop_.defer(*this);  // there is room to write
  }
}

void GrpcChannel::receive() {
  std::array<std::byte, 64 * 1024> bytes;
  while (true) {
    const http2::Moved moved = socket_.read(bytes);
    const auto* const begin = reinterpret_cast<const std::uint8_t*>(bytes.data());
    if (moved.bytes > 0 && nghttp2_session_mem_recv(session_.get(), begin, moved.bytes) < 0) {
      connection_lost();
      return;
    }
    if (moved.ended) {
      connection_lost();
      return;
    }
    if (moved.blocked) break;
  }
  loop_.defer(*this);
}

void GrpcChannel::on_turn_end() {
  if (session_ != nullptr) send();
}

void GrpcChannel::send() {
  http2::Moved moved;
  do {
    if (!http2::take_frames(*session_, outgoing_, kWriteBytes)) {
      connection_lost();
      return;
    }
    moved = outgoing_.flush(socket_);
  } while (moved.bytes > 0 && !moved.blocked && !moved.ended);
  const bool left = state_ == State::kLeaving && nghttp2_session_want_read(session_.get()) == 0;
  if (moved.ended || left) {
    connection_lost();
    return;
  }
  const std::uint32_t wanted = socket_.events(/*reads=*/true, moved.blocked);
  if (wanted == watched_) return;
  watched_ = wanted;
  loop_.change(socket_.descriptor(), wanted, *this);
}

void GrpcChannel::watch_deadlines() {
  if (watches_ || active_.empty()) return;
  watches_ = true;
  loop_.schedule(deadline_, active_.front().deadline);
}

void GrpcChannel::expire() {
  while (!active_.empty() && active_.front().deadline <= loop_.now()) {
    Call& call = active_.front();
    if (session_ != nullptr && call.stream >= 0) {
      nghttp2_submit_rst_stream(session_.get(), NGHTTP2_FLAG_NONE, call.stream, NGHTTP2_CANCEL);
      loop_.defer(*this);
    }
    finish(call, kDeadlineExceeded);
  }
  watch_deadlines();
}

}  // namespace tessera
