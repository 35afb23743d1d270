#include "model/weights.h"

#include <algorithm>
#include <set>
#include <utility>

#include "common/cpus.h"
#include "csrc/row_exchange.h"
#include "csrc/row_restore.h"
#include "request/packed.h"

namespace tessera {
namespace {

// What is copied between two pauses: rows that lie anywhere, or bytes in a row.
constexpr std::size_t kRowsAtOnce = 1024;
constexpr std::size_t kBytesAtOnce = 64U << 10;

// More threads that restore rows would wait for memory together.
constexpr int kRestoringThreads = 8;

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

void keep(Piece& piece, const std::function<void()>& between) {
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

void swap(Piece& piece) {
  Patch& patch = piece.patch;
  const auto count = static_cast<std::size_t>(patch.info.count);
  const auto width = static_cast<std::size_t>(patch.info.width);
  if (!piece.other.empty()) {
    write_rows_at(count, width, rows_of(piece), patch.bytes.data());
    patch.bytes.swap(piece.other);
  } else if (dense(patch)) {
    exchange_bytes(patch.bytes.data(), piece.place.data() + patch.info.offset, patch.bytes.size());
  } else {
    exchange_rows_at(count, width, rows_of(piece), patch.bytes.data());
  }
}

// What undoes a swap of the piece that is settled.
OldRows old_rows(const Piece& piece) {
  const Patch& patch = piece.patch;
  return {.begin = piece.place.data() + patch.info.offset,
          .stride = static_cast<std::size_t>(patch.info.stride),
          .width = static_cast<std::size_t>(patch.info.width),
          .count = static_cast<std::size_t>(patch.info.count),
          .values = patch.bytes.data(),
          .numbers = patch.rows.empty() ? nullptr : patch.rows.data()};
}

// Pieces are exchanged while nothing is computed, but for those that are laid over their tables
// with the first swap. No other piece of its record lies within a laid one, so their order does not
// count.
class StagedOnHost final : public StagedPatches {
 public:
  StagedOnHost(std::vector<Piece> pieces, std::vector<Piece> to_lay, const LayRows& lay_rows)
      : pieces_(std::move(pieces)), laid_(std::move(to_lay)) {
    if (laid_.empty()) return;
    std::vector<LaidPatch> patches;
    patches.reserve(laid_.size());
    for (Piece& piece : laid_) patches.push_back({.record = piece.place, .patch = &piece.patch});
    rows_ = lay_rows(patches);
  }

  using StagedPatches::prepare;
  void prepare(const std::function<void()>& between) override {
    for (Piece& piece : pieces_) keep(piece, between);
    if (rows_ == nullptr) return;
    while (rows_->keep()) between();
  }

  void fetch() override {
    for (const Piece& piece : pieces_) {
      fetch_rows_at(static_cast<std::size_t>(piece.patch.info.count),
                    static_cast<std::size_t>(piece.patch.info.width), rows_of(piece));
    }
  }

  void swap() override {
    for (Piece& piece : pieces_) tessera::swap(piece);
    std::reverse(pieces_.begin(), pieces_.end());  // where two overlap the last is undone first
    if (rows_ == nullptr) {
      for (Piece& piece : laid_) tessera::swap(piece);
    } else if (shown_) {
      rows_->take_back();
    } else {
      while (rows_->keep()) {  // unless it was prepared
      }
      rows_->show();
    }
    shown_ = !shown_;
  }

  bool unfinished() const override { return rows_ != nullptr; }

  bool finish() override { return rows_ != nullptr && rows_->write(); }

  void settle() override {
    for (Piece& piece : pieces_) RawBytes().swap(piece.other);
    rows_.reset();
  }

  // What undoes its swap, in the order in which it is to be written.
  void add_old(std::vector<OldRows>& all) const {
    for (const std::vector<Piece>* pieces : {&pieces_, &laid_}) {
      for (const Piece& piece : *pieces) all.push_back(old_rows(piece));
    }
  }

  std::uint64_t bytes() const override {
    std::uint64_t held = 0;
    for (const std::vector<Piece>* pieces : {&pieces_, &laid_}) {
      for (const Piece& piece : *pieces) {
        held += piece.patch.rows.size() + piece.patch.bytes.size() + piece.other.size();
      }
    }
    return held;
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<Piece> laid_;
  std::unique_ptr<LaidRows> rows_;  // until they are written
  bool shown_ = false;
};

// The bytes of a record that a patch changes, and what lies between them.
std::pair<std::uint64_t, std::uint64_t> extent(const Patch& patch) {
  const PatchInfo& info = patch.info;
  const std::uint64_t last =
      patch.rows.empty() ? info.count - 1 : load<std::uint32_t>(patch.rows.data(), info.count - 1);
  return {info.offset, info.offset + last * info.stride + info.width};
}

// The records in which no patch lies within another one.
std::set<std::string> records_apart(const std::vector<Patch>& patches) {
  std::map<std::string, std::vector<std::pair<std::uint64_t, std::uint64_t>>> extents;
  for (const Patch& patch : patches) extents[patch.info.record].push_back(extent(patch));
  std::set<std::string> apart;
  for (auto& [record, all] : extents) {
    std::sort(all.begin(), all.end());
    const auto within = std::adjacent_find(
        all.begin(), all.end(), [](const auto& a, const auto& b) { return a.second > b.first; });
    if (within == all.end()) apart.insert(record);
  }
  return apart;
}

// A laid row takes as much memory as a row of its table, gaps included, so rows with large gaps are
// left out.
bool may_be_laid(const Patch& patch) {
  return !patch.info.table.empty() && !patch.rows.empty() &&
         patch.info.stride < 2 * patch.info.width;
}

}  // namespace

HostWeights::HostWeights(Places places, LayRows lay_rows)
    : places_(std::move(places)),
      lay_rows_(std::move(lay_rows)),
      threads_(static_cast<std::size_t>(std::min(available_cpus(), kRestoringThreads))) {}

std::optional<std::uint64_t> HostWeights::bytes(const std::string& record) const {
  const auto found = places_.find(record);
  if (found == places_.end()) return std::nullopt;
  return found->second.size();
}

std::unique_ptr<StagedPatches> HostWeights::stage(std::vector<Patch> patches, Beside beside,
                                                  const std::function<void()>& /*between*/) {
  const bool lays = lay_rows_ != nullptr && beside == Beside::kBatches;
  const std::set<std::string> apart = lays ? records_apart(patches) : std::set<std::string>();
  std::vector<Piece> pieces;
  std::vector<Piece> to_lay;
  pieces.reserve(patches.size());
  for (Patch& patch : patches) {
    const std::span<std::byte> place = places_.at(patch.info.record);
    const bool laid = apart.contains(patch.info.record) && may_be_laid(patch);
    (laid ? to_lay : pieces).push_back({.place = place, .patch = std::move(patch), .other = {}});
  }
  return std::make_unique<StagedOnHost>(std::move(pieces), std::move(to_lay), lay_rows_);
}

void Weights::take_back(const std::vector<std::shared_ptr<StagedPatches>>& newest_first) {
  std::size_t done = 0;
  try {
    for (; done < newest_first.size(); ++done) newest_first[done]->swap();
  } catch (...) {
    while (done > 0) newest_first[--done]->swap();
    throw;
  }
}

void HostWeights::take_back(const std::vector<std::shared_ptr<StagedPatches>>& newest_first) {
  std::vector<OldRows> all;
  for (const auto& staged : newest_first) static_cast<const StagedOnHost&>(*staged).add_old(all);
  write_old_rows(std::move(all), threads_);
}

}  // namespace tessera
