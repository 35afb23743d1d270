// TLS of one connection: OpenSSL between a socket's bytes and those of its user.
//
// OpenSSL is given the bytes that one recv has brought, and what it writes leaves in one send, so
// that TLS costs no system calls of its own. What it holds of a connection at rest is some
// kilobytes; at work a record that has come in part (16 KiB), what one recv brought beyond the room
// of its reader (kReadBytes), and one piece of output that the socket has not taken (kWriteBytes
// and a little). There is no renegotiation, no compression and no resumption: connections are long.
//
// Contract: one thread; nothing blocks. The descriptor is the caller's. A handshake is part of the
// first reads and writes: until it is over, nothing that was given to write has left.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

struct ssl_st;
struct ssl_ctx_st;
struct bio_st;

namespace tessera::http2 {

struct Moved;

// What connections encrypt with: certificate, authorities, protocols.
using TlsContext = std::shared_ptr<ssl_ctx_st>;

class TlsSession {
 public:
  enum class Role { kServer, kClient };

  // `host` is the name that a client expects in the server's certificate; empty for a server.
  // Throws std::bad_alloc.
  TlsSession(ssl_ctx_st& context, Role role, const std::string& host);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // As Socket's. What has been written counts once all of its records have left, until when the
  // caller gives the same bytes again.
  Moved read(int descriptor, std::span<std::byte> into);
  Moved write(int descriptor, std::span<const std::byte> from);

  // Sends what is left of records and of the handshake, as far as the socket takes it. False: the
  // connection is broken.
  bool push(int descriptor);

  // Says that no more will be written.
  void end_writing(int descriptor);

  bool shaking_hands() const;

  // Why the other side's certificate was refused, in OpenSSL's words; empty: it was not.
  std::string refused_certificate() const;
  bool has_unsent() const { return sent_ < out_.size(); }

  // Used by OpenSSL.
  struct Bio;

 private:
  // What OpenSSL makes of bytes that have come; they are left as far as there was no room.
  enum class Decrypted { kNeedsMore, kFull, kEnded };
  Decrypted decrypt(std::span<std::byte> into, std::size_t& done);
  void keep_rest();

  ssl_st* ssl_ = nullptr;
  std::span<const std::byte> in_;  // has come, and OpenSSL has not taken it
  std::vector<std::byte> kept_;    // where in_ lies from one read to the next
  std::vector<std::byte> out_;     // records
  std::size_t sent_ = 0;           // of them
  std::size_t in_flight_ = 0;      // bytes that were given to write and whose records are in out_
};

}  // namespace tessera::http2
