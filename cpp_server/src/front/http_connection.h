// One connection of the HTTP port: receives a request's head, sends one answer, ends.
//
// Contract: belongs to the loop's thread. `closed` is called, once, when the connection has ended;
// it destroys the object.
#pragma once

#include <cstdint>
#include <functional>
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
};

class HttpConnection : public http2::EventLoop::Handler {
 public:
  // `answer` and `times` outlive the connection.
  HttpConnection(http2::EventLoop& loop, http2::Socket socket, const PageFunction& answer,
                 const HttpTimes& times, std::function<void()> closed);
  ~HttpConnection() override;
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  // May destroy the connection.
  void on_ready(std::uint32_t events) override;

  // Whether a whole request has come, whose answer is being sent.
  bool has_request() const { return state_ == State::kAnswering; }

 private:
  enum class State {
    kNew,        // no byte has come
    kReceiving,  // a part of a request has come
    kAnswering,  // the answer is being sent
    kEnding,     // the answer has been sent; the client has yet to close
  };

  // Each returns whether the connection goes on.
  bool receive();
  bool answer();
  bool send();
  bool discard();
  void enter(State state, Duration limit);
  // Ends the connection, which destroys it.
  void end();

  http2::EventLoop& loop_;
  http2::Socket socket_;
  const PageFunction& answer_;
  const HttpTimes& times_;
  const std::function<void()> closed_;
  http2::EventLoop::Timer limit_;
  State state_ = State::kNew;
  bool wants_to_write_ = false;
  std::string in_;
  std::string out_;
  std::size_t sent_ = 0;
};

}  // namespace tessera
