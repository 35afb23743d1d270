// A connected, non-blocking stream socket, with TLS or without: the only place that moves bytes
// between a connection and the system.
//
// Contract: owns its descriptor; one thread; nothing blocks.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "http2/tls_session.h"

namespace tessera::http2 {

// What a read or a write did.
struct Moved {
  std::size_t bytes = 0;
  bool blocked = false;  // nothing more can be moved now
  bool ended = false;    // the other side has closed (a read), or the connection is broken
  bool kept = false;     // more has been read than there was room for, which epoll does not tell
};

class Socket {
 public:
  Socket() = default;
  // Takes a connected descriptor, which it makes non-blocking and without delay of small writes.
  explicit Socket(int descriptor);
  ~Socket();
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Begins to connect to the first address of `host` that takes it; waits for it to be connected.
  // An empty text, or why it could not be.
  std::string connect(const std::string& host, int port);

  // Speaks TLS from now on, before anything was read or written; `host` as TlsSession takes it.
  // Throws std::bad_alloc.
  void start_tls(const TlsContext& context, TlsSession::Role role, const std::string& host = "") {
    tls_ = std::make_unique<TlsSession>(*context, role, host);
  }

  // What epoll is to be asked for by whoever waits to read, or has bytes to write.
  std::uint32_t events(bool reads, bool writes) const;

  // Whether TLS is not agreed upon yet.
  bool shaking_hands() const { return tls_ != nullptr && tls_->shaking_hands(); }

  // As TlsSession's; empty without TLS.
  std::string refused_certificate() const {
    return tls_ == nullptr ? "" : tls_->refused_certificate();
  }

  // Writes what TLS has to say of itself; to be called when there is room again.
  void push() {
    if (tls_ != nullptr) tls_->push(descriptor_);
  }

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }

  // The IP address of the other side, as text; an IPv4 address inside an IPv6 one is an IPv4
  // address. Empty where the system does not say.
  std::string peer_address() const;

  // How many bytes of TCP a read would give now; 0 with TLS, where that is not known, and for a
  // Unix socket, which has room for little: its two sides go by turns, and more reads are more
  // turns.
  std::size_t waiting() const;

  Moved read(std::span<std::byte> into);
  Moved write(std::span<const std::byte> from);
  // One after the other.
  Moved write(std::span<const iovec> pieces);

  // No more will be written; the other side may go on.
  void end_writing();

 private:
  int descriptor_ = -1;
  bool tcp_ = false;
  std::unique_ptr<TlsSession> tls_;  // null: bytes go as they are
};

}  // namespace tessera::http2
