// What a client has to write: frames, and between them messages that stay where they are.
//
// A message of hundreds of kilobytes that a session copies into its frame, and a buffer collects
// with others, is moved twice before the system copies it. Here the frame's head alone is copied,
// and one call of the system takes heads and messages together. Short messages are copied, as that
// costs less than a piece of its own.
//
// Contract: one thread. What `refer` is given lives until it was written or `clear` was called.
#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <vector>

#include "http2/socket.h"

namespace tessera {

class GatheredFrames {
 public:
  // Copies `bytes`.
  void append(std::span<const std::byte> bytes);

  // Writes `bytes` from where they are.
  void refer(std::span<const std::byte> bytes);

  // Writes what waits, in as few calls as that takes.
  http2::Moved flush(http2::Socket& socket);

  std::size_t waiting() const { return waiting_; }

  void clear();

 private:
  struct Piece {
    std::vector<std::byte> own;           // empty: it is somebody else's
    std::span<const std::byte> borrowed;  // otherwise
    std::size_t written = 0;

    std::span<const std::byte> left() const {
      return (own.empty() ? borrowed : std::span<const std::byte>(own)).subspan(written);
    }
  };

  void written(std::size_t bytes);

  std::deque<Piece> pieces_;
  std::size_t waiting_ = 0;
  std::vector<std::byte> spare_;  // memory of a piece that was written
};

}  // namespace tessera
