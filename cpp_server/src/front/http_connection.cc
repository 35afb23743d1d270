#include "front/http_connection.h"

#include <sys/epoll.h>

#include <array>
#include <new>
#include <span>
#include <utility>

namespace tessera {
namespace {

constexpr std::size_t kMaxHeadBytes = 16 * 1024;

}  // namespace

HttpConnection::HttpConnection(http2::EventLoop& loop, http2::Socket socket,
                               const PageFunction& answer, const HttpTimes& times,
                               std::function<void()> closed)
    : loop_(loop),
      socket_(std::move(socket)),
      answer_(answer),
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
  if (in_.find("\r\n\r\n") != std::string::npos || in_.size() > kMaxHeadBytes) return answer();
  return true;
}

bool HttpConnection::answer() {
  const auto end = in_.find("\r\n\r\n");
  out_ = end == std::string::npos ? http_refusal(400, "the request is too large\n")
                                  : http_response(in_.substr(0, end), answer_);
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
