#include "front/http_connection.h"

#include <sys/epoll.h>

#include <array>
#include <new>
#include <span>
#include <string_view>
#include <utility>
#include <variant>

namespace tessera {
namespace {

constexpr std::size_t kMaxHeadBytes = 16 * 1024;

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
      limit_([this] { end(); }) {
  if (!loop_.add(socket_.descriptor(), EPOLLIN, *this)) throw std::bad_alloc();
  enter(State::kNew, times_.first_byte);
}

HttpConnection::~HttpConnection() {
  loop_.cancel(limit_);
  loop_.remove(socket_.descriptor(), *this);
}

void HttpConnection::enter(State state, Duration limit) {
  state_ = state;
  loop_.schedule(limit_, loop_.now() + limit);
}

void HttpConnection::on_ready(std::uint32_t /*events*/) {
  bool goes_on = false;
  try {
    switch (state_) {
      case State::kNew:
      case State::kReceiving: goes_on = receive(); break;
      case State::kAnswering: goes_on = send(); break;
      case State::kWaiting:
      case State::kEnding: goes_on = discard(); break;
    }
  } catch (const std::bad_alloc&) {  // no memory for the page: this client goes without it
    goes_on = false;
  }
  if (!goes_on) end();
}

void HttpConnection::end() {
  const std::function<void()> closed = closed_;  // outlives the connection
  closed();
}

bool HttpConnection::receive() {
  std::array<std::byte, 4096> bytes;
  const http2::Moved moved = socket_.read(bytes);
  if (moved.ended) return false;
  if (moved.bytes == 0) return true;
  if (state_ == State::kNew) enter(State::kReceiving, times_.request);
  in_.append(reinterpret_cast<const char*>(bytes.data()), moved.bytes);
  return read_request();
}

// Looks at what has come: answers it, or waits for more of it.
bool HttpConnection::read_request() {
  constexpr std::string_view kHeadEnd = "\r\n\r\n";
  if (!head_) {
    const auto end = in_.find(kHeadEnd);
    if (end == std::string::npos) {
      return in_.size() <= kMaxHeadBytes ||
             answer({.status = 400, .body = "the request is too large\n"}, true);
    }
    auto parsed = parse_head(in_.substr(0, end));
    if (const auto* refusal = std::get_if<HttpAnswer>(&parsed)) return answer(*refusal, true);
    const auto& head = std::get<HttpHead>(parsed);
    if (head.method != HttpHead::Method::kPost) {
      return answer(answers_.page(head.path), head.method == HttpHead::Method::kGet);
    }
    if (!answers_.takes_posts())
      return answer({.status = 405, .body = "only GET and HEAD\n"}, true);
    head_ = head;
    body_at_ = end + kHeadEnd.size();
  }
  if (in_.size() - body_at_ < head_->body_bytes) return true;
  enter(State::kWaiting, times_.outcome);
  const std::string body = in_.substr(body_at_, head_->body_bytes);
  in_ = std::string();
  answers_.post(number_, head_->path, body);
  return true;
}

void HttpConnection::give(const HttpAnswer& answer) {
  bool goes_on = false;
  try {
    goes_on = this->answer(answer, true);
  } catch (const std::bad_alloc&) {  // this client goes without it
  }
  if (!goes_on) end();
}

bool HttpConnection::answer(const HttpAnswer& answer, bool with_body) {
  out_ = http_response(answer, with_body);
  in_ = std::string();
  enter(State::kAnswering, times_.answer);
  return send();
}

bool HttpConnection::send() {
  const http2::Moved moved = socket_.write(std::as_bytes(std::span(out_)).subspan(sent_));
  sent_ += moved.bytes;
  if (moved.ended) return false;
  if (sent_ < out_.size()) {
    if (!wants_to_write_) loop_.change(socket_.descriptor(), EPOLLOUT, *this);
    wants_to_write_ = true;
    return true;
  }
  out_ = std::string();
  // Closed at once, what the client still sends would take the answer from it.
  socket_.end_writing();
  enter(State::kEnding, times_.ending);
  if (wants_to_write_) loop_.change(socket_.descriptor(), EPOLLIN, *this);
  return true;
}

bool HttpConnection::discard() {
  std::array<std::byte, 4096> bytes;
  return !socket_.read(bytes).ended;
}

}  // namespace tessera
