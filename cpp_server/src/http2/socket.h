// A connected, non-blocking stream socket: the only place that moves bytes between a connection
// and the system, so that another transport (TLS) would be put behind these two functions.
//
// Contract: owns its descriptor; one thread; nothing blocks.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace tessera::http2 {

// What a read or a write did.
struct Moved {
  std::size_t bytes = 0;
  bool blocked = false;  // nothing more can be moved now
  bool ended = false;    // the other side has closed (a read), or the connection is broken
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

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }

  // The IP address of the other side, as text; an IPv4 address inside an IPv6 one is an IPv4
  // address. Empty where the system does not say.
  std::string peer_address() const;

  Moved read(std::span<std::byte> into);
  Moved write(std::span<const std::byte> from);

  // No more will be written; the other side may go on.
  void end_writing();

 private:
  int descriptor_ = -1;
};

}  // namespace tessera::http2
