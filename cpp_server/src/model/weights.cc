#include "model/weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "request/packed.h"

namespace tessera {
namespace {

// Rows lie anywhere in gigabytes: each is asked for so many before its turn, which hides most of
// the way to memory.
constexpr std::size_t kAhead = 24;
constexpr std::size_t kCacheLine = 64;

// The compiler knows the size, so that registers hold what is moved.
template <std::size_t kBytes>
void exchange_piece(std::byte* a, std::byte* b) {
  std::array<std::byte, kBytes> first;
  std::array<std::byte, kBytes> second;
  std::memcpy(first.data(), a, kBytes);
  std::memcpy(second.data(), b, kBytes);
  std::memcpy(a, second.data(), kBytes);
  std::memcpy(b, first.data(), kBytes);
}

// std::swap_ranges moves one byte at a time, which takes longer, while no batch is computed.
void exchange(std::byte* a, std::byte* b, std::size_t bytes) {
  std::size_t at = 0;
  for (; at + 64 <= bytes; at += 64) exchange_piece<64>(a + at, b + at);
  for (; at + 16 <= bytes; at += 16) exchange_piece<16>(a + at, b + at);
  for (; at + 4 <= bytes; at += 4) exchange_piece<4>(a + at, b + at);
  for (; at < bytes; ++at) exchange_piece<1>(a + at, b + at);
}

class StagedOnHost final : public StagedPatches {
 public:
  struct Piece {
    std::span<std::byte> place;  // the whole record
    Patch patch;
  };

  explicit StagedOnHost(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  void swap() override {
    for (Piece& piece : pieces_) swap(piece);
    std::reverse(pieces_.begin(), pieces_.end());  // where two overlap the last is undone first
  }

  std::uint64_t bytes() const override {
    std::uint64_t held = 0;
    for (const Piece& piece : pieces_) {
      held += piece.patch.rows.size() + piece.patch.bytes.size();
    }
    return held;
  }

 private:
  static void swap(Piece& piece) {
    Patch& patch = piece.patch;
    const auto width = static_cast<std::size_t>(patch.info.width);
    const auto count = static_cast<std::size_t>(patch.info.count);
    if (patch.rows.empty() && patch.info.stride == patch.info.width) {
      exchange(patch.bytes.data(), piece.place.data() + patch.info.offset, patch.bytes.size());
      return;
    }
    const auto place_of = [&](std::size_t i) {
      const std::uint64_t row = patch.rows.empty() ? i : load<std::uint32_t>(patch.rows.data(), i);
      return piece.place.data() + patch.info.offset + row * patch.info.stride;
    };
    const auto ask_for = [&](std::size_t i) {
      const std::byte* const begin = place_of(i);
      for (std::size_t at = 0; at < std::min<std::size_t>(width, 512); at += kCacheLine) {
        __builtin_prefetch(begin + at, /*rw=*/1);
      }
    };
    for (std::size_t i = 0; i < std::min(kAhead, count); ++i) ask_for(i);
    std::byte* staged = patch.bytes.data();
    for (std::size_t i = 0; i < count; ++i, staged += width) {
      if (i + kAhead < count) ask_for(i + kAhead);
      exchange(staged, place_of(i), width);
    }
  }

  std::vector<Piece> pieces_;
};

}  // namespace

std::optional<std::uint64_t> HostWeights::bytes(const std::string& record) const {
  const auto found = places_.find(record);
  if (found == places_.end()) return std::nullopt;
  return found->second.size();
}

std::unique_ptr<StagedPatches> HostWeights::stage(std::vector<Patch> patches) {
  std::vector<StagedOnHost::Piece> pieces;
  pieces.reserve(patches.size());
  for (Patch& patch : patches) {
    pieces.push_back({places_.at(patch.info.record), std::move(patch)});
  }
  return std::make_unique<StagedOnHost>(std::move(pieces));
}

}  // namespace tessera
