// A client's connection to a gRPC server, for unary calls of one method, on nghttp2.
//
// It speaks gRPC's protocol over HTTP/2 as published (length-prefixed messages, status from the
// trailers, deadlines) and nothing that a load generator does not need: no compression, of metadata
// a token alone. A connection that is lost is made anew, after a pause that doubles up to
// a second; calls that wait for one end with it in UNAVAILABLE where it cannot be had.
//
// Contract: belongs to the loop's thread, once the loop runs. Calls are many at a time; every one
// ends in one call of `finished`. `loop` and `caller` outlive the channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <string_view>

#include "common/clock.h"
#include "http2/event_loop.h"
#include "http2/session.h"
#include "http2/socket.h"
#include "load/address.h"
#include "load/gathered_frames.h"

namespace tessera {

// A status code of gRPC, 0 to 16.
using GrpcCode = int;

// Its name in gRPC's own spelling.
std::string_view grpc_code_name(GrpcCode code);

// What a call is known by to whoever begins it.
struct CallTag {
  TimePoint intended{};     // when it should have been sent
  std::size_t request = 0;  // which of the requests it sends
};

class GrpcChannel : private http2::EventLoop::Handler, private http2::EventLoop::Deferred {
 public:
  // Told how calls end.
  class Caller {
   public:
    virtual ~Caller() = default;
    // The call that was begun with `tag` has ended. `answer` is the message, where the code is 0.
    // New calls may be begun.
    virtual void finished(const CallTag& tag, GrpcCode code, std::string_view answer) = 0;
  };

  // `path` is the method's, such as "/predictor.Predictor/Predict". Every call has `timeout`, and
  // the header `authorization` unless that is empty. Connections encrypt with `tls`, unless that is
  // null.
  GrpcChannel(http2::EventLoop& loop, const Address& address, std::string path,
              std::string authorization, http2::TlsContext tls, Duration timeout, Caller& caller);
  ~GrpcChannel() override;
  GrpcChannel(const GrpcChannel&) = delete;
  GrpcChannel& operator=(const GrpcChannel&) = delete;

  // Begins a call. `framed` is the message with its prefix (see `framed_message`), which must live
  // as long as the channel, whose socket may take it after the call has ended; `path`, the call's
  // own method, unless that is empty, must live until the call has ended.
  void call(std::span<const std::byte> framed, const CallTag& tag, std::string_view path = {});

  // Called by nghttp2.
  struct Callbacks;

 private:
  enum class State { kDown, kConnecting, kUp, kLeaving };

  struct Call {
    std::list<Call>::iterator place;  // its own, in active_ or free_
    std::span<const std::byte> framed;
    std::size_t sent = 0;
    CallTag tag{};
    std::string_view path;  // empty: the channel's
    TimePoint deadline{};
    std::int32_t stream = -1;  // -1: waits for a connection
    int http_status = 0;
    GrpcCode code = -1;  // -1: no status has come
    bool other_content = false;
    std::string answer;  // with its prefix
  };
  using Calls = std::list<Call>;

  void on_ready(std::uint32_t events) override;
  void on_turn_end() override;
  void connect();
  void connected();
  void connection_lost();
  void receive();
  void send();
  void submit(Call& call);
  void close_if_left();
  void finish(Call& call, GrpcCode code);
  GrpcCode outcome(const Call& call, std::uint32_t http2_error) const;
  void expire();
  void watch_deadlines();

  http2::EventLoop& loop_;
  const Address address_;
  const std::string path_;
  const std::string authorization_;
  const http2::TlsContext tls_;
  const std::string timeout_header_;
  const Duration timeout_;
  Caller& caller_;
  http2::EventLoop::Timer reconnect_;
  http2::EventLoop::Timer deadline_;
  State state_ = State::kDown;
  bool reconnects_ = false;    // reconnect_ is scheduled
  bool watches_ = false;       // deadline_ is scheduled
  std::uint32_t watched_ = 0;  // epoll's events
  Duration pause_;
  http2::Socket socket_;
  http2::SessionPointer session_;
  GatheredFrames outgoing_;
  Calls active_;  // in the order of their deadlines
  Calls free_;
};

// `message` as it goes over the wire: its length before it.
std::string framed_message(std::string_view message);

}  // namespace tessera
