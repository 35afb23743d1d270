// One connection of the HTTP port: receives a request, sends one answer, ends.
//
// Contract: belongs to the loop's thread. `closed` is called, once, when the connection has ended;
// it destroys the object.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "common/clock.h"
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
};

// What a connection asks of whoever has it.
class HttpAnswers {
 public:
  virtual ~HttpAnswers() = default;
  virtual HttpAnswer page(const std::string& path) = 0;
  // Whether POST is known at all. If it is, `post` leads to one HttpConnection::give of the
  // connection `number`, on the loop's thread, unless that has ended.
  virtual bool takes_posts() const = 0;
  virtual void post(std::uint64_t number, const std::string& path, const std::string& body) = 0;
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
  void give(const HttpAnswer& answer);

  std::uint64_t number() const { return number_; }

  // Whether a whole request has come, whose answer is awaited or being sent.
  bool has_request() const { return state_ == State::kWaiting || state_ == State::kAnswering; }

 private:
  enum class State {
    kNew,        // no byte has come
    kReceiving,  // a part of a request has come
    kWaiting,    // the answer is awaited
    kAnswering,  // the answer is being sent
    kEnding,     // the answer has been sent; the client has yet to close
  };

  // Each returns whether the connection goes on.
  bool receive();
  bool read_request();
  bool answer(const HttpAnswer& answer, bool with_body);
  bool send();
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
  bool wants_to_write_ = false;
  std::string in_;
  std::optional<HttpHead> head_;  // of a POST whose body is being received
  std::size_t body_at_ = 0;       // in `in_`
  std::string out_;
  std::size_t sent_ = 0;
};

}  // namespace tessera
