// Many sets of rows get back the bytes that they had: how a server goes back over several commits.
//
// Commit after commit, each row would be a miss of the caches and of the TLB, and most pages would
// be written to once for each commit. So a table is gone through once, and in each part of it,
// which is no larger than what the TLB covers, the rows of all commits are written. Parts are
// handed out to several threads, as a core that waits for memory leaves most of what memory can do
// to others.
//
// Contract: one call at a time for the same rows, and nobody reads or writes them meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "row_exchange.h"

namespace tessera {

// `count` rows, at least one, of what begins at `begin`, one every `stride` bytes; the `width`
// bytes at `values + i * width` are those of row `number(i)`.
struct OldRows {
  std::byte* begin = nullptr;
  std::size_t stride = 0;
  std::size_t width = 0;
  std::size_t count = 0;
  const std::byte* values = nullptr;
  // Rows' numbers, ascending, of 4 bytes or 8 each; null: 0, 1, ... count - 1.
  const void* numbers = nullptr;
  std::size_t number_bytes = 4;

  std::uint64_t number(std::size_t i) const {
    if (numbers == nullptr) return i;
    const std::byte* const at = static_cast<const std::byte*>(numbers) + i * number_bytes;
    if (number_bytes == 8) {
      std::uint64_t wide = 0;
      std::memcpy(&wide, at, sizeof wide);
      return wide;
    }
    std::uint32_t narrow = 0;
    std::memcpy(&narrow, at, sizeof narrow);
    return narrow;
  }

  // The first of them from `from` on whose number is `row` or more.
  std::size_t first_from(std::size_t from, std::uint64_t row) const {
    std::size_t left = count - from;
    while (left > 0) {
      const std::size_t half = left / 2;
      if (number(from + half) < row) {
        from += half + 1;
        left -= half + 1;
      } else {
        left = half;
      }
    }
    return from;
  }

  // Writes rows [first, last).
  void write(std::size_t first, std::size_t last) const {
    write_rows_at(
        last - first, width, [&](std::size_t i) { return begin + number(first + i) * stride; },
        values + first * width);
  }

  const std::byte* extent_begin() const { return begin + number(0) * stride; }
  const std::byte* extent_end() const { return begin + number(count - 1) * stride + width; }
};

// See the top; `write_old_rows` is what to call.
class RowRestore {
 public:
  explicit RowRestore(std::vector<OldRows> all) : all_(std::move(all)) {
    std::stable_sort(all_.begin(), all_.end(),
                     [](const OldRows& a, const OldRows& b) { return key(a) < key(b); });
    for (std::size_t first = 0; first < all_.size();) {
      std::size_t last = first;
      std::uint64_t begin = all_[first].number(0);
      std::uint64_t end = 0;
      for (; last < all_.size() && key(all_[last]) == key(all_[first]); ++last) {
        begin = std::min(begin, all_[last].number(0));
        end = std::max(end, all_[last].number(all_[last].count - 1) + 1);
      }
      const OldRows& one = all_[first];
      for (const std::uint64_t rows = rows_within(kTurnBytes, one); begin < end; begin += rows) {
        turns_.push_back({.first = first, .last = last, .begin = begin, .end = begin + rows});
      }
      most_ = std::max(most_, last - first);
      first = last;
    }
  }

  // Whether no two sets lie within each other but those of the same table: their order counts.
  static bool apart(const std::vector<OldRows>& all) {
    std::vector<const OldRows*> sorted;
    sorted.reserve(all.size());
    for (const OldRows& one : all) sorted.push_back(&one);
    std::sort(sorted.begin(), sorted.end(), [](const OldRows* a, const OldRows* b) {
      return a->extent_begin() < b->extent_begin();
    });
    const OldRows* furthest = nullptr;
    for (const OldRows* const one : sorted) {
      if (furthest != nullptr && key(*furthest) != key(*one) &&
          one->extent_begin() < furthest->extent_end()) {
        return false;
      }
      if (furthest == nullptr || one->extent_end() > furthest->extent_end()) furthest = one;
    }
    return true;
  }

  void run(std::size_t threads) {
    threads = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(turns_.size(), 1));
    std::vector<std::vector<std::size_t>> cursors(threads, std::vector<std::size_t>(most_));
    std::vector<std::jthread> others;
    others.reserve(threads);
    for (std::size_t i = 1; i < threads; ++i) {
      try {
        others.emplace_back([this, &mine = cursors[i]] { take_turns(mine); });
      } catch (const std::exception&) {  // those that there are do it
        break;
      }
    }
    take_turns(cursors.front());
  }

 private:
  // The rows of all sets in a part, which the TLB covers, are written before those of the next
  // part; a turn is what a thread takes at once.
  static constexpr std::size_t kPartBytes = 2U << 20;
  static constexpr std::size_t kTurnBytes = 32U << 20;

  // Rows [begin, end) of sets [first, last), which are of the same table.
  struct Turn {
    std::size_t first;
    std::size_t last;
    std::uint64_t begin;
    std::uint64_t end;
  };

  static std::tuple<const std::byte*, std::size_t, std::size_t> key(const OldRows& rows) {
    return {rows.begin, rows.stride, rows.width};
  }

  static std::uint64_t rows_within(std::size_t bytes, const OldRows& rows) {
    return std::max<std::size_t>(bytes / rows.stride, 1);
  }

  void take_turns(std::vector<std::size_t>& cursors) {
    for (;;) {
      const std::size_t at = next_.fetch_add(1, std::memory_order_relaxed);
      if (at >= turns_.size()) return;
      take(turns_[at], cursors);
    }
  }

  void take(const Turn& turn, std::vector<std::size_t>& cursors) const {
    const std::size_t sets = turn.last - turn.first;
    for (std::size_t i = 0; i < sets; ++i) {
      cursors[i] = all_[turn.first + i].first_from(0, turn.begin);
    }
    const std::uint64_t rows = rows_within(kPartBytes, all_[turn.first]);
    for (std::uint64_t begin = turn.begin; begin < turn.end; begin += rows) {
      const std::uint64_t end = std::min(begin + rows, turn.end);
      for (std::size_t i = 0; i < sets; ++i) {
        const OldRows& set = all_[turn.first + i];
        const std::size_t last = set.first_from(cursors[i], end);
        set.write(cursors[i], last);
        cursors[i] = last;
      }
    }
  }

  std::vector<OldRows> all_;  // those of a table together, in the order in which they are written
  std::vector<Turn> turns_;
  std::size_t most_ = 0;  // sets of one table
  std::atomic<std::size_t> next_ = 0;
};

// Writes all sets of rows; where several have the same row it gets the bytes of the last one. On
// `threads` threads at most, the calling one among them. Throws std::bad_alloc, before any byte has
// changed.
inline void write_old_rows(std::vector<OldRows> all, std::size_t threads) {
  if (!RowRestore::apart(all)) {
    for (const OldRows& one : all) one.write(0, one.count);
    return;
  }
  RowRestore(std::move(all)).run(threads);
}

}  // namespace tessera
