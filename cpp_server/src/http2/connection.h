// One client's connection: an HTTP/2 session over a socket, and the calls that are open on it.
//
// What comes is read once a turn of the loop, so that no client keeps the others waiting, and what
// is to be said leaves at the end of the turn in one write. A client that does not read what it is
// sent is not read from either. Who goes beyond a limit is told GOAWAY (ENHANCE_YOUR_CALM) and
// closed.
//
// A connection that has been closed stays for a moment to read and forget what the client is still
// sending: otherwise the system would throw away what the client has not read yet.
//
// Contract: belongs to its loop's thread. The context outlives it. Its owner destroys it once
// `gone` has been called with it, not sooner than at the end of the turn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "http2/call.h"
#include "http2/call_gate.h"
#include "http2/connection_bytes.h"
#include "http2/event_loop.h"
#include "http2/frame_filter.h"
#include "http2/limits.h"
#include "http2/method_table.h"
#include "http2/request_head.h"
#include "http2/session.h"
#include "http2/socket.h"
#include "http2/unpacker.h"

namespace tessera::http2 {

class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  virtual void gone(Connection& connection) = 0;
};

// What the connections of a loop share.
struct ConnectionContext {
  EventLoop& loop;
  const Limits& limits;
  Counters& counters;
  const MethodTable& methods;
  ConnectionOwner& owner;
  std::span<std::byte> read_buffer;  // at least 16 KiB, which is read of one in a turn at least
  CallGate* gate = nullptr;          // null: every call may be heard
};

class Connection final : private EventLoop::Handler, private EventLoop::Deferred {
 public:
  // Throws std::bad_alloc; std::system_error where the loop cannot watch the socket.
  Connection(const ConnectionContext& context, Socket socket);
  ~Connection() override;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Takes what the client has sent.
  void receive(std::span<const std::byte> bytes);

  // Sends what `call` has written, and its status if it has finished.
  void answer(Call& call);

  // Ends what has lasted too long; to be called a few times a second.
  void sweep();

  // The client's IP address, as text; empty where the system does not say.
  const std::string& peer();

  // Asks the client to begin its further calls elsewhere; those that it begins here are heard.
  void announce_end();
  // Takes no further call, and closes once those that are open have been answered.
  void leave();
  // Closes now.
  void close(CloseReason reason);

 private:
  friend struct SessionCallbacks;
  enum class State { kOpen, kLeaving, kLingering, kGone };

  void on_ready(std::uint32_t events) override;
  bool read_some(std::size_t share);
  std::span<std::byte> rest_of_message(std::size_t most);
  void on_turn_end() override;

  // What the session tells; 0, or an error of nghttp2 that ends the connection.
  int on_begin_headers(const nghttp2_frame& frame);
  int on_header(std::string_view name, std::string_view value);
  int on_frame(const nghttp2_frame& frame);
  int on_data(std::int32_t stream, std::span<const std::byte> data);
  int on_frame_sent(const nghttp2_frame& frame);
  int on_stream_closed(std::int32_t stream);
  ssize_t take_answer(Call& call, std::span<std::byte> into, std::uint32_t& flags);

  FrameFilter::Verdict judge(const FrameHead& head);
  int fail(CloseReason reason);
  int begin_call(std::int32_t stream, bool ended);
  int refuse_unheard(std::int32_t stream, const Status& status, bool counted);
  int messages_ended(std::int32_t stream);
  void open(Call& call, std::int32_t stream, TimePoint deadline);
  void take_data(Call& call, std::span<const std::byte> data);
  void take_message(Call& call);
  void deliver(Call& call);
  void unpack();
  void unpack_now(Call& call);
  void finish_unpacking(Call& call, Unpacker::State state, Buffer made, std::int64_t most);
  Status full_status(bool of_server);
  void refuse(Call& call, const Status& status);
  void submit_status(std::int32_t stream, const Status& status, bool only,
                     std::string_view request_id);
  void submit_http_status(std::int32_t stream, int status);
  Call* call_of(std::int32_t stream) const;
  void unlink(Call& call);
  bool sweep_calls(TimePoint now, bool full);
  void sweep_age(TimePoint now);
  void write_goaway(CloseReason reason);
  void linger();
  void watch();
  void vanish();

  const ConnectionContext& context_;
  Socket socket_;
  std::optional<std::string> peer_;  // once it was asked for
  SessionPointer session_;
  std::size_t read_bytes_;  // that may be read in a turn
  Outgoing out_;
  FrameFilter filter_;
  std::uint32_t last_stream_ = 0;            // that the client has opened
  std::size_t block_bytes_ = 0;              // of the last block of headers, as they came
  const std::byte* received_end_ = nullptr;  // of the bytes that the session is told of
  RequestHead head_;
  State state_ = State::kOpen;
  std::optional<CloseReason> failure_;  // found while the session was told of bytes
  bool client_leaves_ = false;
  bool handshaken_ = false;
  bool reads_on_ = false;      // what the socket has kept is read in the next turn
  bool long_frames_ = false;   // the last bytes were read to their message
  std::uint32_t watched_ = 0;  // epoll's events
  int streams_ = 0;
  Call* calls_ = nullptr;  // those of open streams; a stream that was refused has none
  const std::shared_ptr<ConnectionBytes> bytes_;
  // Calls whose compressed message has come, in the order of coming, and what unpacks the first.
  std::vector<Call*> packed_;
  std::optional<Unpacker> unpacker_;
  int unpacking_steps_;  // that are left in this turn
  RateLimit control_frames_;
  RateLimit pings_;
  RateLimit resets_;
  TimePoint begun_;
  TimePoint block_begun_ = kNever;  // a block of headers is coming since
  TimePoint idle_since_;
  TimePoint old_at_ = kNever;
  TimePoint notice_ends_at_ = kNever;  // of its age
  TimePoint leaves_until_ = kNever;    // for its age
  TimePoint progress_at_;              // the socket took bytes, or there were none
  TimePoint lingers_until_ = kNever;
  std::size_t lingering_bytes_ = 0;
};

}  // namespace tessera::http2
