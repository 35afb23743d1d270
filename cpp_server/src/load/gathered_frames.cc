#include "load/gathered_frames.h"

#include <algorithm>
#include <array>
#include <utility>

namespace tessera {
namespace {

constexpr std::size_t kLeastBorrowed = 8 * 1024;
// Pieces of one call, and memory that is kept for the next one.
constexpr std::size_t kPiecesAtOnce = 64;
constexpr std::size_t kKeptBytes = 256 * 1024;

}  // namespace

void GatheredFrames::append(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (pieces_.empty() || pieces_.back().own.empty()) {
    pieces_.emplace_back();
    pieces_.back().own = std::exchange(spare_, {});
  }
  std::vector<std::byte>& own = pieces_.back().own;
  own.insert(own.end(), bytes.begin(), bytes.end());
  waiting_ += bytes.size();
}

void GatheredFrames::refer(std::span<const std::byte> bytes) {
  if (bytes.size() < kLeastBorrowed) {
    append(bytes);
    return;
  }
  pieces_.emplace_back();
  pieces_.back().borrowed = bytes;
  waiting_ += bytes.size();
}

http2::Moved GatheredFrames::flush(http2::Socket& socket) {
  http2::Moved all;
  while (!pieces_.empty()) {
    std::array<iovec, kPiecesAtOnce> taken;
    std::size_t count = 0;
    for (const Piece& piece : pieces_) {
      if (count == taken.size()) break;
      const std::span<const std::byte> left = piece.left();
      taken[count++] = {const_cast<std::byte*>(left.data()), left.size()};
    }
    const http2::Moved moved = socket.write(std::span<const iovec>(taken).first(count));
    written(moved.bytes);
    all.bytes += moved.bytes;
    all.blocked = moved.blocked;
    all.ended = moved.ended;
    if (moved.blocked || moved.ended) break;
  }
  return all;
}

void GatheredFrames::written(std::size_t bytes) {
  waiting_ -= bytes;
  while (bytes > 0) {
    Piece& piece = pieces_.front();
    const std::size_t now = std::min(bytes, piece.left().size());
    piece.written += now;
    bytes -= now;
    if (!piece.left().empty()) return;
    if (piece.own.capacity() > spare_.capacity() && piece.own.capacity() <= kKeptBytes) {
      piece.own.clear();
      spare_ = std::move(piece.own);
    }
    pieces_.pop_front();
  }
}

void GatheredFrames::clear() {
  pieces_.clear();
  waiting_ = 0;
}

}  // namespace tessera
