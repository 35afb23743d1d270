// Puts gRPC messages together from the data that comes, each in one piece of memory.
//
// Contract: one thread. A message that comes whole in one piece is held without being accounted;
// memory for one that comes in several is taken from `bytes` as it grows with what has come, not
// with what was announced, and given back when the message is whole or the reader is reset. A
// compressed message is accounted until `replace` or `reset`, however it has come.
#pragma once

#include <cstdint>
#include <span>

#include "http2/buffer.h"
#include "http2/connection_bytes.h"
#include "http2/grpc_wire.h"

namespace tessera::http2 {

class MessageReader {
 public:
  enum class State {
    kMore,            // the message is not whole
    kWhole,           // it is
    kWrongFlag,       // its first byte says neither that it is compressed nor that it is not
    kTooLarge,        // it announces more than max_message_bytes
    kConnectionFull,  // there is no room for more of it: in the connection's share,
    kServerFull,      // or in what all connections have
    kNoMemory,
  };

  // Takes bytes from the front of `data`, up to the end of a message. Whatever is not kMore or
  // kWhole is final. `ahead` bytes that have come with `data` follow it.
  State feed(std::span<const std::byte>& data, ConnectionBytes& bytes, std::size_t ahead = 0);

  // Memory for the next bytes of a message, up to `most` or the rest of it, of which the system has
  // `here`: what is read to there and then fed is not copied. Empty where there is none, or it is
  // not known yet how long the message is.
  std::span<std::byte> room(std::size_t here, std::size_t most, ConnectionBytes& bytes);

  // The message, until `next` or `reset`.
  std::span<const std::byte> message() const { return message_.bytes(); }
  // Bytes that a message has announced, and those that have come.
  std::uint32_t announced() const { return announced_; }
  std::size_t received() const { return message_.size(); }
  // Whether a message that has come says that it is compressed.
  bool compressed() const { return prefix_[0] != std::byte{0}; }
  // Whether nothing of a message has come.
  bool empty() const { return prefix_bytes_ == 0; }

  // Forgets the message that was whole; keeps its memory.
  void next();

  // The message is `unpacked`.
  void replace(Buffer unpacked, ConnectionBytes& bytes);

  // Forgets everything, and gives memory above `kept_bytes` back.
  void reset(std::size_t kept_bytes, ConnectionBytes& bytes);

 private:
  State grow(std::size_t now, std::size_t ahead, ConnectionBytes& bytes);
  State account(std::size_t capacity, ConnectionBytes& bytes);
  void settle(ConnectionBytes& bytes);

  Prefix prefix_{};
  std::size_t prefix_bytes_ = 0;
  std::uint32_t announced_ = 0;
  std::int64_t accounted_ = 0;
  Buffer message_;
};

}  // namespace tessera::http2
