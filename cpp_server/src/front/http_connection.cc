#include "front/http_connection.h"

#include <sys/epoll.h>

#include <array>
#include <new>
#include <span>
#include <string_view>
#include <utility>
#include <variant>

#include "common/text.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxHeadBytes = 16 * 1024;
constexpr std::size_t kReadBytes = 16 * 1024;
// Bodies of so many bytes are free: the connections bound them.
constexpr std::size_t kFreeBytes = 64 * 1024;

}  // namespace

HttpConnection::HttpConnection(std::uint64_t number, http2::EventLoop& loop, http2::Socket socket,
                               HttpAnswers& answers, const HttpTimes& times,
                               std::function<void()> closed)
    : number_(number),
      loop_(loop),
      socket_(std::move(socket)),
      answers_(answers),
      times_(times),
      closed_(std::move(closed)),
      limit_([this] { end(); }),
      watched_(EPOLLIN) {
  if (!loop_.add(socket_.descriptor(), EPOLLIN, *this)) throw std::bad_alloc();
  enter(State::kNew, times_.first_byte);
}

HttpConnection::~HttpConnection() {
  if (call_ != nullptr) call_->cancel();
  loop_.cancel(limit_);
  loop_.remove(socket_.descriptor(), *this);
}

void HttpConnection::enter(State state, Duration limit) {
  state_ = state;
  loop_.schedule(limit_, loop_.now() + limit);
}

void HttpConnection::on_ready(std::uint32_t events) {
  if ((events & EPOLLOUT) != 0) socket_.push();
  bool goes_on = false;
  try {
    switch (state_) {
      case State::kNew:
      case State::kIdle:
      case State::kReceiving: goes_on = receive(); break;
      case State::kAnswering: goes_on = send(); break;
      case State::kWaiting:
      case State::kEnding: goes_on = discard(); break;
    }
  } catch (const std::bad_alloc&) {  // no memory for the page: this client goes without it
    goes_on = false;
  }
  goes_on ? watch() : end();
}

void HttpConnection::watch() {
  const bool answers = state_ == State::kAnswering;
  const std::uint32_t wanted = socket_.events(!answers, answers);
  if (wanted == watched_) return;
  watched_ = wanted;
  loop_.change(socket_.descriptor(), wanted, *this);
}

void HttpConnection::end() {
  const std::function<void()> closed = closed_;  // outlives the connection
  closed();
}

bool HttpConnection::receive() {
  std::array<std::byte, kReadBytes> bytes;
  const http2::Moved moved = socket_.read(bytes);
  if (moved.ended) return false;
  if (moved.bytes == 0) return true;
  if (state_ != State::kReceiving) enter(State::kReceiving, times_.request);
  if (head_ && !take_room(moved.bytes)) {
    const ByteBudget& bodies = answers_.bodies();
    return refuse(json_refusal(
        429, text("the server is full: bodies of requests over HTTP take ", bodies.held(),
                  " bytes (limit ", bodies.limit(), "); try again later")));
  }
  in_.append(reinterpret_cast<const char*>(bytes.data()), moved.bytes);
  if (!read_request()) return false;
  return !moved.kept || state_ != State::kReceiving || receive();
}

bool HttpConnection::take_room(std::size_t bytes) {
  if (in_.size() + bytes <= kFreeBytes) return true;
  if (room_ == nullptr) room_ = std::make_shared<BodyRoom>(answers_.bodies());
  return room_->take(bytes);
}

// Looks at what has come: answers it, or waits for more of it.
bool HttpConnection::read_request() {
  constexpr std::string_view kHeadEnd = "\r\n\r\n";
  if (head_) return finish_post();
  const auto end = in_.find(kHeadEnd);
  if (end == std::string::npos) {
    return in_.size() <= kMaxHeadBytes ||
           refuse({.status = 400, .body = "the request is too large\n"});
  }
  auto parsed = parse_head(in_.substr(0, end), answers_.hosts());
  if (auto* refusal = std::get_if<HttpAnswer>(&parsed)) return refuse(std::move(*refusal));
  in_.erase(0, end + kHeadEnd.size());
  auto& head = std::get<HttpHead>(parsed);
  if (auto refusal = answers_.refusal(head)) {
    return answer(std::move(*refusal), head.method != HttpHead::Method::kHead, false);
  }
  if (head.method == HttpHead::Method::kPost) return begin_post(std::move(head));
  const bool alone = in_.empty();
  return answer(answers_.page(head.path), head.method == HttpHead::Method::kGet,
                head.keeps_alive && alone);
}

bool HttpConnection::begin_post(HttpHead head) {
  const auto most = answers_.most_body_bytes(head.path);
  if (!most.has_value()) return refuse({.status = 405, .body = "only GET and HEAD\n"});
  if (head.body_bytes > *most) {
    return refuse(json_refusal(413, text("the body has more than ", *most, " bytes, the limit")));
  }
  if (head.awaits_continue && in_.size() < head.body_bytes) {
    // So few bytes always find room in the socket of a client that has read its last answer.
    constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
    if (socket_.write(std::as_bytes(std::span(kContinue))).ended) return false;
  }
  head_ = std::move(head);
  return finish_post();
}

bool HttpConnection::finish_post() {
  if (in_.size() < head_->body_bytes) return true;
  enter(State::kWaiting, times_.outcome);
  keeps_alive_ = head_->keeps_alive && in_.size() == head_->body_bytes;
  in_.resize(head_->body_bytes);
  HttpRequest request{.head = std::move(*head_),
                      .body = std::move(in_),
                      .peer = socket_.peer_address(),
                      .held = std::move(room_)};
  head_.reset();
  in_ = std::string();
  call_ = answers_.post(number_, std::move(request));
  return true;
}

void HttpConnection::give(HttpAnswer answer) {
  bool goes_on = false;
  call_ = nullptr;
  try {
    goes_on = this->answer(std::move(answer), true, keeps_alive_);
  } catch (const std::bad_alloc&) {  // this client goes without it
  }
  goes_on ? watch() : end();
}

bool HttpConnection::answer(HttpAnswer answer, bool with_body, bool keeps_alive) {
  keeps_alive_ = keeps_alive && !answers_.ending();
  out_ = http_response(answer, with_body, keeps_alive_);
  sent_ = 0;
  held_ = std::move(answer.held);
  in_ = std::string();
  head_.reset();
  room_ = nullptr;
  enter(State::kAnswering, times_.answer);
  return send();
}

bool HttpConnection::send() {
  const http2::Moved moved = socket_.write(std::as_bytes(std::span(out_)).subspan(sent_));
  sent_ += moved.bytes;
  if (moved.ended) return false;
  if (sent_ < out_.size()) return true;
  out_ = std::string();
  held_ = nullptr;
  if (keeps_alive_) {
    enter(State::kIdle, times_.idle);
  } else {
    // Closed at once, what the client still sends would take the answer from it.
    socket_.end_writing();
    enter(State::kEnding, times_.ending);
  }
  return true;
}

bool HttpConnection::discard() {
  std::array<std::byte, 4096> bytes;
  const http2::Moved moved = socket_.read(bytes);
  if (moved.bytes > 0) keeps_alive_ = false;  // of a next request, which nobody has read
  return !moved.ended;
}

}  // namespace tessera
