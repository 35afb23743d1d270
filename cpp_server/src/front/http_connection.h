// One connection of the HTTP port: receives a request, sends its answer, and waits for the next one
// as long as the client wants that. A client that sends a request before it has its answer has that
// one answered, and the connection ends.
//
// Contract: belongs to the loop's thread. `closed` is called, once, when the connection has ended;
// it destroys the object.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/clock.h"
#include "front/byte_budget.h"
#include "front/http_page.h"
#include "http2/event_loop.h"
#include "http2/socket.h"

namespace tessera {

// How long a connection may take for each of its steps.
struct HttpTimes {
  Duration first_byte = std::chrono::seconds(5);  // from its beginning to its first byte
  Duration request = std::chrono::seconds(10);    // from there to the end of the request
  Duration answer = std::chrono::seconds(10);     // until the client has taken the answer
  Duration ending = std::chrono::seconds(1);      // from there until the client closes
  Duration outcome = std::chrono::hours(1);       // of what a POST asks for
  Duration idle = std::chrono::seconds(75);       // from an answer to the next request
};

// What a connection asks of whoever has it.
class HttpAnswers {
 public:
  virtual ~HttpAnswers() = default;
  virtual std::optional<HttpAnswer> refusal(const HttpHead& head) = 0;
  virtual HttpAnswer page(const std::string& path) = 0;
  // The body that a POST to `path` may have; nothing: there is no POST.
  virtual std::optional<std::size_t> most_body_bytes(const std::string& path) = 0;
  // Leads to one HttpConnection::give of the connection `number`, on the loop's thread, unless that
  // has ended.
  virtual std::shared_ptr<HttpCall> post(std::uint64_t number, HttpRequest request) = 0;
  // What bodies take together while they come and are read.
  virtual ByteBudget& bodies() = 0;
  // By which names browsers may ask.
  virtual const HostRule& hosts() const = 0;
  // Whether connections are to end with their next answer.
  virtual bool ending() const = 0;
};

// What one body has taken of `budget`.
class BodyRoom {
 public:
  explicit BodyRoom(ByteBudget& budget) : budget_(budget) {}
  ~BodyRoom() { budget_.give(taken_); }
  BodyRoom(const BodyRoom&) = delete;
  BodyRoom& operator=(const BodyRoom&) = delete;

  // False: there is no room.
  bool take(std::size_t bytes) {
    const auto more = static_cast<std::int64_t>(bytes);
    if (!budget_.take(more)) return false;
    taken_ += more;
    return true;
  }

 private:
  ByteBudget& budget_;
  std::int64_t taken_ = 0;
};

class HttpConnection : public http2::EventLoop::Handler {
 public:
  // `answers` and `times` outlive the connection.
  HttpConnection(std::uint64_t number, http2::EventLoop& loop, http2::Socket socket,
                 HttpAnswers& answers, const HttpTimes& times, std::function<void()> closed);
  ~HttpConnection() override;
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  // May destroy the connection.
  void on_ready(std::uint32_t events) override;

  // The answer of the POST that it waits for. May destroy the connection.
  void give(HttpAnswer answer);

  std::uint64_t number() const { return number_; }

  // Whether a whole request has come, whose answer is awaited or being sent.
  bool has_request() const { return state_ == State::kWaiting || state_ == State::kAnswering; }

 private:
  enum class State {
    kNew,        // no byte has come
    kReceiving,  // a part of a request has come
    kWaiting,    // the answer is awaited
    kAnswering,  // the answer is being sent
    kIdle,       // the answer has been sent; another request may come
    kEnding,     // the answer has been sent; the client has yet to close
  };

  // Each returns whether the connection goes on.
  bool receive();
  bool read_request();
  bool begin_post(HttpHead head);
  bool finish_post();
  // Makes room for what may come of the body.
  bool take_room(std::size_t bytes);
  bool answer(HttpAnswer answer, bool with_body, bool keeps_alive);
  bool refuse(HttpAnswer answer) { return this->answer(std::move(answer), true, false); }
  bool send();
  // Asks for what can be done with the socket now.
  void watch();
  bool discard();
  void enter(State state, Duration limit);
  // Ends the connection, which destroys it.
  void end();

  const std::uint64_t number_;
  http2::EventLoop& loop_;
  http2::Socket socket_;
  HttpAnswers& answers_;
  const HttpTimes& times_;
  const std::function<void()> closed_;
  http2::EventLoop::Timer limit_;
  State state_ = State::kNew;
  std::uint32_t watched_;         // epoll's events
  bool keeps_alive_ = false;      // after the answer
  std::string in_;                // of a request: its head, then its body alone
  std::optional<HttpHead> head_;  // of a POST whose body is being received
  std::shared_ptr<BodyRoom> room_;
  std::shared_ptr<HttpCall> call_;  // of a POST whose answer is awaited
  std::shared_ptr<void> held_;      // of the answer
  std::string out_;
  std::size_t sent_ = 0;
};

}  // namespace tessera
