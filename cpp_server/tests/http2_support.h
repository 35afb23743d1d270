// What tests and the fuzzer of the HTTP/2 layer share: a connection over a pair of sockets, methods
// that echo, and a client that writes frames by hand.
#pragma once

#include <netinet/in.h>
#include <nghttp2/nghttp2.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "http2/connection.h"

namespace tessera::http2::test {

inline std::string big_endian(std::uint64_t number, int bytes) {
  std::string text;
  for (int i = bytes - 1; i >= 0; --i) text += static_cast<char>(number >> (8 * i));
  return text;
}

inline std::string frame(int type, int flags, std::uint32_t stream, std::string_view body = "") {
  return big_endian(body.size(), 3) + big_endian(static_cast<std::uint64_t>(type), 1) +
         big_endian(static_cast<std::uint64_t>(flags), 1) + big_endian(stream, 4) +
         std::string(body);
}

// A header that is in no table, of parts shorter than 127 bytes.
inline std::string literal(std::string_view name, std::string_view value) {
  return std::string(1, '\0') + static_cast<char>(name.size()) + std::string(name) +
         static_cast<char>(value.size()) + std::string(value);
}

inline std::string call_headers(std::string_view path, const std::string& more = "") {
  return literal(":method", "POST") + literal(":scheme", "http") + literal(":path", path) +
         literal(":authority", "test") + literal("content-type", "application/grpc") +
         literal("te", "trailers") + more;
}

inline std::string message(std::string_view content) {
  return std::string(1, '\0') + big_endian(content.size(), 4) + std::string(content);
}

inline std::string begin_call(std::uint32_t stream, std::string_view path = "/test/Echo",
                              const std::string& more = "") {
  return frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, stream, call_headers(path, more));
}

inline std::string whole_call(std::uint32_t stream, std::string_view content,
                              std::string_view path = "/test/Echo") {
  return begin_call(stream, path) +
         frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, stream, message(content));
}

inline std::string preface() {
  return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(NGHTTP2_SETTINGS, 0, 0);
}

// Answers every message with itself; a unary call of "wait" waits until somebody calls `finish`.
class EchoCall final : public Call {
 public:
  EchoCall(Kind kind, EventLoop& its_loop, std::vector<EchoCall*>& waiting)
      : Call(kind, its_loop), streams_(kind == Kind::kStreaming), waiting_(waiting) {}

  void answer() {
    write("late");
    finish({});
  }

 private:
  void write(std::string_view text) {
    std::byte* const out = begin_message(text.size());
    if (!text.empty()) std::memcpy(out, text.data(), text.size());
  }

  void on_message(std::span<const std::byte> bytes) override {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (!streams_ && text == "wait") {
      waiting_.push_back(this);
      return;
    }
    write(text);
    if (streams_) {
      flush();
    } else {
      finish({});
    }
  }
  void on_last_message() override { finish({}); }
  void on_end() override { delete this; }

  const bool streams_;
  std::vector<EchoCall*>& waiting_;
};

class EchoMethod final : public Method {
 public:
  EchoMethod(Call::Kind kind, std::vector<EchoCall*>& waiting) : kind_(kind), waiting_(waiting) {}
  Call& begin(EventLoop& loop) override { return *new EchoCall(kind_, loop, waiting_); }

 private:
  const Call::Kind kind_;
  std::vector<EchoCall*>& waiting_;
};

inline std::array<int, 2> unix_pair() {
  std::array<int, 2> made{};
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, made.data()) != 0) throw std::bad_alloc();
  return made;
}

inline std::array<int, 2> tcp_pair() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const bytes = reinterpret_cast<sockaddr*>(&address);
  const int client = ::socket(AF_INET, SOCK_STREAM, 0);
  const bool connected = ::bind(listener, bytes, length) == 0 && ::listen(listener, 1) == 0 &&
                         ::getsockname(listener, bytes, &length) == 0 &&
                         ::connect(client, bytes, length) == 0;
  const int server = connected ? ::accept(listener, nullptr, nullptr) : -1;
  ::close(listener);
  if (server < 0) throw std::bad_alloc();
  return {client, server};
}

// A connection and its client, both in one thread.
class Link final : private ConnectionOwner {
 public:
  explicit Link(Limits given = {}, bool tcp = false) : limits(given) {
    methods_.add("/test/Echo", std::make_unique<EchoMethod>(Call::Kind::kUnary, waiting));
    methods_.add("/test/Stream", std::make_unique<EchoMethod>(Call::Kind::kStreaming, waiting));
    const std::array<int, 2> made = tcp ? tcp_pair() : unix_pair();
    client = Socket(made[0]);
    connection_ = std::make_unique<Connection>(context_, Socket(made[1]));
  }
  ~Link() override {
    for (EchoCall* call : std::exchange(waiting, {})) call->answer();
    connection_.reset();
    turn();
  }

  // Everything that can be done now, on both sides.
  void turn() {
    for (int i = 0; i < 3; ++i) {
      loop_.stop();
      loop_.run();
      if (gone_) connection_.reset();
      std::array<std::byte, 65'536> bytes;
      for (Moved moved; !closed && reads;) {
        moved = client.read(bytes);
        closed = moved.ended;
        received_.append(reinterpret_cast<const char*>(bytes.data()), moved.bytes);
        if (moved.blocked) break;
      }
    }
    parse();
  }

  void send(const std::string& bytes) {
    std::string_view left = bytes;
    for (int tries = 0; !left.empty() && tries < 1'000; ++tries) {
      const Moved moved = client.write(std::as_bytes(std::span(left)));
      left.remove_prefix(moved.bytes);
      turn();
      if (moved.ended) return;
    }
  }

  void sweep() {
    turn();
    if (connection_ != nullptr) connection_->sweep();
    turn();
  }

  Connection& connection() { return *connection_; }
  std::span<std::byte> buffer() { return buffer_; }  // what the loop reads to
  std::uint64_t closed_for(CloseReason reason) {
    return counters.closed[static_cast<std::size_t>(reason)];
  }

  const Limits limits;
  Counters counters;
  std::vector<EchoCall*> waiting;
  Socket client;
  bool reads = true;    // what the server sends
  bool closed = false;  // by the server
  // By stream: what has come.
  std::map<std::uint32_t, std::string> data;
  std::map<std::uint32_t, std::map<std::string, std::string>> headers;
  std::map<std::uint32_t, std::uint32_t> resets;  // error codes
  std::vector<std::uint32_t> goaways;             // error codes

 private:
  void gone(Connection&) override { gone_ = true; }

  void parse() {
    while (received_.size() >= FrameHead::kBytes) {
      const auto bytes = std::as_bytes(std::span(received_));
      const FrameHead head(bytes.first<FrameHead::kBytes>());
      if (received_.size() < FrameHead::kBytes + head.length) return;
      handle(head, received_.substr(FrameHead::kBytes, head.length));
      received_.erase(0, FrameHead::kBytes + head.length);
    }
  }

  static std::uint32_t number_at(const std::string& body, std::size_t at) {
    std::uint32_t number = 0;
    for (std::size_t i = at; i < at + 4; ++i) {
      number = number << 8U | static_cast<unsigned char>(body[i]);
    }
    return number;
  }

  void handle(const FrameHead& head, const std::string& body) {
    if (head.type == NGHTTP2_DATA) data[head.stream] += body;
    if (head.type == NGHTTP2_RST_STREAM) resets[head.stream] = number_at(body, 0);
    if (head.type == NGHTTP2_GOAWAY) goaways.push_back(number_at(body, 4));
    if (head.type != NGHTTP2_HEADERS) return;
    std::string left = body;
    while (!left.empty()) {
      nghttp2_nv pair{};
      int flags = 0;
      const ssize_t used = nghttp2_hd_inflate_hd2(
          inflater_.get(), &pair, &flags, reinterpret_cast<const std::uint8_t*>(left.data()),
          left.size(), 1);
      if (used < 0) return;
      left.erase(0, static_cast<std::size_t>(used));
      if ((flags & NGHTTP2_HD_INFLATE_EMIT) != 0) {
        headers[head.stream][{reinterpret_cast<char*>(pair.name), pair.namelen}] =
            std::string(reinterpret_cast<char*>(pair.value), pair.valuelen);
      }
      if ((flags & NGHTTP2_HD_INFLATE_FINAL) != 0) break;
    }
    nghttp2_hd_inflate_end_headers(inflater_.get());
  }

  static nghttp2_hd_inflater* new_inflater() {
    nghttp2_hd_inflater* made = nullptr;
    nghttp2_hd_inflate_new(&made);
    return made;
  }

  EventLoop loop_;
  MethodTable methods_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(65'536);
  ConnectionContext context_{loop_, limits, counters, methods_, *this, buffer_};
  std::unique_ptr<Connection> connection_;
  bool gone_ = false;
  std::string received_;
  std::unique_ptr<nghttp2_hd_inflater, void (*)(nghttp2_hd_inflater*)> inflater_{
      new_inflater(), &nghttp2_hd_inflate_del};
};

inline std::string status_of(Link& link, std::uint32_t stream) {
  return link.headers[stream]["grpc-status"];
}

}  // namespace tessera::http2::test
