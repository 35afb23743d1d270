#include "model/weights.h"

#include <algorithm>
#include <utility>

#include "csrc/row_exchange.h"
#include "request/packed.h"

namespace tessera {
namespace {

// What is copied between two pauses: rows that lie anywhere, or bytes in a row.
constexpr std::size_t kRowsAtOnce = 1024;
constexpr std::size_t kBytesAtOnce = 64U << 10;

struct Piece {
  std::span<std::byte> place;  // the whole record
  Patch patch;
  // The other ones of the bytes that are in place and those in `patch`: the first swap then writes
  // and need not read. Empty: not prepared, or settled.
  RawBytes other;
};

// Where row i of the patch begins.
auto rows_of(const Piece& piece) {
  return [&patch = piece.patch, begin = piece.place.data() + piece.patch.info.offset,
          all = piece.patch.rows.empty()](std::size_t i) {
    const std::uint64_t row = all ? i : load<std::uint32_t>(patch.rows.data(), i);
    return begin + row * patch.info.stride;
  };
}

// Whether its rows are all that lies between the first and the last of them.
bool dense(const Patch& patch) {
  return patch.rows.empty() && patch.info.stride == patch.info.width;
}

class StagedOnHost final : public StagedPatches {
 public:
  explicit StagedOnHost(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  using StagedPatches::prepare;
  void prepare(const std::function<void()>& between) override {
    for (Piece& piece : pieces_) {
      const auto count = static_cast<std::size_t>(piece.patch.info.count);
      const auto width = static_cast<std::size_t>(piece.patch.info.width);
      RawBytes kept(count * width);
      if (dense(piece.patch)) {
        std::byte* const begin = piece.place.data() + piece.patch.info.offset;
        for (std::size_t done = 0; done < kept.size(); done += kBytesAtOnce) {
          keep_rows_at(
              1, std::min(kBytesAtOnce, kept.size() - done),
              [at = begin + done](std::size_t) { return at; }, kept.data() + done);
          between();
        }
      } else {
        for (std::size_t done = 0; done < count; done += kRowsAtOnce) {
          keep_rows_at(
              std::min(kRowsAtOnce, count - done), width,
              [row_at = rows_of(piece), done](std::size_t i) { return row_at(done + i); },
              kept.data() + done * width);
          between();
        }
      }
      piece.other = std::move(kept);
    }
  }

  void fetch() override {
    for (const Piece& piece : pieces_) {
      fetch_rows_at(static_cast<std::size_t>(piece.patch.info.count),
                    static_cast<std::size_t>(piece.patch.info.width), rows_of(piece));
    }
  }

  void swap() override {
    for (Piece& piece : pieces_) swap(piece);
    std::reverse(pieces_.begin(), pieces_.end());  // where two overlap the last is undone first
  }

  void settle() override {
    for (Piece& piece : pieces_) RawBytes().swap(piece.other);
  }

  std::uint64_t bytes() const override {
    std::uint64_t held = 0;
    for (const Piece& piece : pieces_) {
      held += piece.patch.rows.size() + piece.patch.bytes.size() + piece.other.size();
    }
    return held;
  }

 private:
  static void swap(Piece& piece) {
    Patch& patch = piece.patch;
    const auto count = static_cast<std::size_t>(patch.info.count);
    const auto width = static_cast<std::size_t>(patch.info.width);
    if (!piece.other.empty()) {
      write_rows_at(count, width, rows_of(piece), patch.bytes.data());
      patch.bytes.swap(piece.other);
    } else if (dense(patch)) {
      exchange_bytes(patch.bytes.data(), piece.place.data() + patch.info.offset,
                     patch.bytes.size());
    } else {
      exchange_rows_at(count, width, rows_of(piece), patch.bytes.data());
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

std::unique_ptr<StagedPatches> HostWeights::stage(std::vector<Patch> patches,
                                                  const std::function<void()>& /*between*/) {
  std::vector<Piece> pieces;
  pieces.reserve(patches.size());
  for (Patch& patch : patches) {
    const std::span<std::byte> place = places_.at(patch.info.record);
    pieces.push_back({.place = place, .patch = std::move(patch), .other = {}});
  }
  return std::make_unique<StagedOnHost>(std::move(pieces));
}

}  // namespace tessera
