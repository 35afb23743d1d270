#include "model/weights.h"

#include <algorithm>
#include <utility>

#include "csrc/row_exchange.h"
#include "request/packed.h"

namespace tessera {
namespace {

// Rows that are touched between two pauses.
constexpr std::size_t kRowsAtOnce = 1024;

struct Piece {
  std::span<std::byte> place;  // the whole record
  Patch patch;
};

// Where row i of the patch begins.
auto rows_of(const Piece& piece) {
  return [&patch = piece.patch, begin = piece.place.data() + piece.patch.info.offset,
          all = piece.patch.rows.empty()](std::size_t i) {
    const std::uint64_t row = all ? i : load<std::uint32_t>(patch.rows.data(), i);
    return begin + row * patch.info.stride;
  };
}

class StagedOnHost final : public StagedPatches {
 public:
  explicit StagedOnHost(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  using StagedPatches::prepare;
  void prepare(const std::function<void()>& between) override {
    for (const Piece& piece : pieces_) {
      const auto count = static_cast<std::size_t>(piece.patch.info.count);
      for (std::size_t done = 0; done < count; done += kRowsAtOnce) {
        touch_rows_at(std::min(kRowsAtOnce, count - done),
                      static_cast<std::size_t>(piece.patch.info.width),
                      [row_at = rows_of(piece), done](std::size_t i) { return row_at(done + i); });
        between();
      }
    }
  }

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
    if (patch.rows.empty() && patch.info.stride == patch.info.width) {
      exchange_bytes(patch.bytes.data(), piece.place.data() + patch.info.offset,
                     patch.bytes.size());
      return;
    }
    exchange_rows_at(static_cast<std::size_t>(patch.info.count), width, rows_of(piece),
                     patch.bytes.data());
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
  std::vector<Piece> pieces;
  pieces.reserve(patches.size());
  for (Patch& patch : patches) {
    pieces.push_back({places_.at(patch.info.record), std::move(patch)});
  }
  return std::make_unique<StagedOnHost>(std::move(pieces));
}

}  // namespace tessera
