// Unpacks one compressed message in steps, so that neither a thread nor the memory is taken by few
// bytes that unpack to many.
//
// The formats are those of gRPC: gzip (RFC 1952) of one member, and "deflate", which is zlib's
// format (RFC 1950). What follows the end of either is damage.
//
// Contract: one thread. The packed bytes and `bytes` outlive it; what it has taken of `bytes` is
// given back at its end.
#pragma once

#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "http2/buffer.h"
#include "http2/connection_bytes.h"
#include "http2/grpc_wire.h"

namespace tessera::http2 {

class Unpacker {
 public:
  // What a step takes or makes at most.
  static constexpr std::size_t kStepBytes = 64 * 1024;

  enum class State {
    kMore,            // there is more to do
    kWhole,           // `take` has the message
    kDamaged,         // it is not of the format, or is cut
    kTooLarge,        // it unpacks to more than `most_bytes`
    kConnectionFull,  // there is no room for more of it: in the connection's share,
    kServerFull,      // or in what all connections have
    kNoMemory,
  };

  // `encoding` is not kIdentity.
  Unpacker(Encoding encoding, std::span<const std::byte> packed, std::size_t most_bytes,
           ConnectionBytes& bytes);
  ~Unpacker();
  Unpacker(const Unpacker&) = delete;
  Unpacker& operator=(const Unpacker&) = delete;

  // Goes on a little. Whatever is not kMore is final.
  State step();

  // What was unpacked.
  Buffer take() { return std::move(made_); }

 private:
  State grow();

  z_stream stream_{};
  bool ready_ = false;  // zlib has its memory
  std::span<const std::byte> left_;
  const std::size_t most_bytes_;
  ConnectionBytes& bytes_;
  std::int64_t accounted_ = 0;
  Buffer made_;
};

}  // namespace tessera::http2
