// One gRPC call: the messages that come, and the answer. What a method does is in a class derived
// from Call; http2/connection.h moves the bytes.
//
// A call's life: Method::begin gives a call for a stream that a client has opened. on_message hears
// of each message. The answer is written with begin_message, and ends with finish. on_end is the
// last thing that a call hears: then its stream has closed and nobody works on it; it may be used
// again.
//
// Contract: a call belongs to one loop, and all of it happens on the loop's thread, but for this: a
// unary call is, from on_message on, in the hands of whoever answers it, on any thread, until that
// one calls finish; meanwhile the loop calls on_cancelled alone. A streaming call stays the loop's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "common/clock.h"
#include "common/status.h"
#include "http2/buffer.h"
#include "http2/connection_bytes.h"
#include "http2/event_loop.h"
#include "http2/grpc_wire.h"
#include "http2/message_reader.h"

namespace tessera::http2 {

class Connection;

class Call : private EventLoop::Task {
 public:
  enum class Kind {
    kUnary,      // one message, one answer
    kStreaming,  // any number of both
  };

  ~Call() override = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 protected:
  Call(Kind kind, EventLoop& loop) : kind_(kind), loop_(loop) {}

  // A message has come, whole. A unary call's stays where it is until on_end, or until
  // release_message; a streaming call's until on_message returns.
  virtual void on_message(std::span<const std::byte> message) = 0;

  // Streaming only: no message will come any more.
  virtual void on_last_message() {}

  // The stream has closed before the answer was sent: nobody waits for it.
  virtual void on_cancelled() {}

  // The call was refused before on_message, with `status`, which the client hears.
  virtual void on_refused(const Status& /*status*/) {}

  // The answer has left or never will. The call is idle, and may destroy itself.
  virtual void on_end() = 0;

  // When the client gives up, as far as it said so.
  TimePoint call_deadline() const { return deadline_; }

  // Takes room for an answer that is not scores; it is given back when the call ends. A status
  // where there is none. On the loop's thread.
  Status take_room(std::size_t bytes);

  // The call's x-request-id (request_head.h); empty: it has none. Until on_end.
  std::string_view request_id() const { return request_id_; }

  // The call's traceparent header; empty: it has none. Until on_end.
  std::string_view traceparent() const { return traceparent_; }

  // The answer says so in its trailers: x-request-id. `id`, printable ASCII, is borrowed until
  // on_end; empty: the answer has none.
  void tell_request_id(std::string_view id) { told_id_ = id; }

  // The IP address that the call comes from, as text; empty where the system does not say. Only
  // while on_message or on_refused runs.
  std::string_view peer() const;

  // What the connection's calls for scores hold; from on_message until on_end.
  ByteShare& connection_share() { return bytes_->requests(); }

  // Memory for the next message of the answer, of `bytes` bytes. Throws std::bad_alloc.
  std::byte* begin_message(std::size_t bytes);

  // Sends what has been written so far. Streaming only.
  void flush();

  // Ends the answer with `status`; what has been written of the answer of a call that fails is sent
  // only where some of it has left already. The last use of a unary call by whoever answers it; of
  // a streaming call that has ended nothing follows.
  void finish(const Status& status);

  // Gives the message's memory back, where it is more than is kept for the next.
  void release_message();

  EventLoop& loop() { return loop_; }

  // Bytes of the message that has come, and of the answer that the session has not taken.
  std::size_t message_bytes() const { return reader_.received(); }
  std::size_t unread_bytes() const { return answer_.size() - sent_; }

 private:
  friend class Connection;

  void run() override;  // finish has been called
  void closed();        // the stream has gone
  void end();

  const Kind kind_;
  EventLoop& loop_;

  // Where it is; null: its stream has gone.
  Connection* connection_ = nullptr;
  std::int32_t stream_ = 0;
  Call* previous_ = nullptr;  // among the connection's calls
  Call* next_call_ = nullptr;
  TimePoint opened_{};
  TimePoint deadline_ = kNever;

  std::string request_id_;
  std::string traceparent_;
  std::string_view told_id_;

  MessageReader reader_;
  Encoding encoding_ = Encoding::kIdentity;
  std::shared_ptr<ConnectionBytes> bytes_;  // of the connection that it is on, or was
  std::int64_t room_bytes_ = 0;             // taken of it for the answer
  bool reading_ = false;                    // a message is expected, or is coming

  Buffer answer_;
  std::size_t sent_ = 0;    // bytes of the answer that the session has taken
  TimePoint answered_{};    // when bytes that have not been taken began to wait
  bool submitted_ = false;  // the answer's headers have been
  bool finished_ = false;   // nothing follows `answer_` but the status
  bool done_ = false;       // the status has been taken, too
  bool in_other_hands_ = false;
  Status status_;
};

// A method of a service.
class Method {
 public:
  virtual ~Method() = default;
  // An idle call of `loop`, whose thread asks.
  virtual Call& begin(EventLoop& loop) = 0;

  // Whether a CallGate is asked before a call of it is heard.
  bool guarded() const { return guarded_; }

 private:
  friend class MethodTable;
  bool guarded_ = true;
};

}  // namespace tessera::http2
