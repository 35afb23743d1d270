// Puts gRPC messages together from the data that comes, each in one piece of memory.
//
// Contract: one thread. A message that comes whole in one piece is held without being accounted;
// memory for one that comes in several is taken from `counters` as it grows with what has come, not
// with what was announced, and given back when the message is whole or the reader is reset.
#pragma once

#include <cstdint>
#include <span>

#include "http2/buffer.h"
#include "http2/grpc_wire.h"
#include "http2/limits.h"

namespace tessera::http2 {

class MessageReader {
 public:
  enum class State {
    kMore,        // the message is not whole
    kWhole,       // it is
    kCompressed,  // it says that it is compressed, or nothing that can be
    kTooLarge,    // it announces more than max_message_bytes
    kFull,        // the server has no room for more of it
    kNoMemory,
  };

  // Takes bytes from the front of `data`, up to the end of a message. Whatever is not kMore or
  // kWhole is final.
  State feed(std::span<const std::byte>& data, const Limits& limits, Counters& counters);

  // The message, until `next` or `reset`.
  std::span<const std::byte> message() const { return message_.bytes(); }
  // Bytes that a message has announced, and those that have come.
  std::uint32_t announced() const { return announced_; }
  std::size_t received() const { return message_.size(); }
  // Whether nothing of a message has come.
  bool empty() const { return prefix_bytes_ == 0; }

  // Forgets the message that was whole; keeps its memory.
  void next();

  // Forgets everything, and gives memory above `kept_bytes` back.
  void reset(std::size_t kept_bytes, Counters& counters);

 private:
  State grow(std::size_t now, const Limits& limits, Counters& counters);
  void settle(Counters& counters);

  Prefix prefix_{};
  std::size_t prefix_bytes_ = 0;
  std::uint32_t announced_ = 0;
  std::int64_t accounted_ = 0;
  Buffer message_;
};

}  // namespace tessera::http2
