// New rows of tables that lookups read where they were staged, until they have been written.
//
// A lookup must never see a part of a commit, so whoever writes its rows into the tables of a model
// has to be alone with them, for milliseconds: a row that was just fetched takes some 20 ns, and a
// commit has a hundred thousand. An overlay needs nobody to be alone for longer than it takes to
// switch a pointer. From show() on every lookup takes a row that the overlay has from there, and
// reads none of those that are being written; write() brings them into the tables beside the
// lookups, and once all are there lookups read the tables alone.
//
// How: the ids of a lookup are resolved to rows in one place (resolve_bags), and kernels
// compute where a row lies from its number. Staged rows lie as far from each other as those of
// their table and a multiple of that from its first row, so they are rows of the table with other
// numbers, which may be negative, and kernels need not know. Where a lookup's plan does not fit
// that (scales in an array of their own), it first has all rows written.
//
// Two ways to show one. Alone: while no lookup of these storages runs, show(kAlone); threads that
// have set nothing see all overlays. Or beside lookups: each pass sets look_up_to() first, to the
// number of the overlay of the state that it is to see, and show(kBeside) then changes nothing for
// passes of the states before. Once these have ended, write() may begin. A lookup whose plan does
// not fit throws there, as it cannot have the rows written, and fits() is false from then on.
//
// Contract: keep, show, take_back and write: one thread at a time. show(kAlone), and take_back and
// the destructor after it: while no lookup of these storages runs. take_back after show(kBeside):
// before another thread looks up to this overlay. The destructor after write: once those lookups
// have ended that began before write gave false. laid_over and LaidStorage: any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "plan.h"
#include "returned_memory.h"

namespace tessera {

// New rows of one table: `count` of them, `width` bytes each at `values`, for rows `numbers` of
// what begins at `table`, one every `stride` bytes.
struct NewRows {
  std::byte* storage = nullptr;
  std::size_t storage_bytes = 0;
  std::byte* table = nullptr;
  std::size_t stride = 0;
  std::size_t width = 0;
  std::vector<std::uint32_t> numbers;  // ascending, each of them once, at least one
  std::byte* values = nullptr;         // when they were kept: what the table had
};

// The new rows of one table, as far from each other as the table's own.
class LaidTable {
 public:
  explicit LaidTable(NewRows rows);

  const std::byte* begin() const { return rows_.table; }
  // Behind the last row that changes.
  const std::byte* end() const;
  std::size_t stride() const { return rows_.stride; }
  std::size_t width() const { return rows_.width; }
  std::size_t count() const { return rows_.numbers.size(); }

  // The new place of a row, in the numbers of the table's rows; nothing: it does not change.
  std::optional<std::int64_t> find(std::int64_t row) const {
    if (row < 0 || row > rows_.numbers.back()) return std::nullopt;
    return find_within(static_cast<std::uint32_t>(row));
  }

  // Copies the new bytes of rows [first, first + count), and to where these were the old ones.
  void keep(std::size_t first, std::size_t count) const;
  // The same rows get their new bytes.
  void write(std::size_t first, std::size_t count) const;
  // All rows get the bytes that were kept.
  void restore() const;

 private:
  struct GiveBack {
    std::size_t bytes;
    void operator()(std::byte* memory) const noexcept { give_memory_back(memory, bytes); }
  };

  std::optional<std::int64_t> find_within(std::uint32_t row) const;

  NewRows rows_;
  std::unique_ptr<std::byte, GiveBack> memory_{nullptr, GiveBack{}};
  std::byte* new_rows_ = nullptr;  // a multiple of the stride away from the table
  std::int64_t distance_ = 0;      // in rows
  int shift_ = 0;
  // How many rows there are before the first one whose number, shifted, is b.
  std::vector<std::uint32_t> begins_;
};

class RowOverlay;

// What an overlay has of one storage.
class LaidStorage {
 public:
  LaidStorage(RowOverlay& overlay, const std::byte* begin, const std::byte* end)
      : overlay_(overlay), begin_(begin), end_(end) {}

  void add(const LaidTable& table) { tables_.push_back(&table); }
  // Puts the tables in order; false: two of them lie within each other.
  bool sort();

  bool holds(const std::byte* byte) const { return byte >= begin_ && byte < end_; }
  std::int64_t number() const;

  // Of the features of a lookup: `rows` and `starts` of ids [begin, end) of the one that `plan` is
  // of, as they are to be read now. Where the plan does not fit it writes all rows, and returns, or
  // throws std::runtime_error.
  void lay(const std::uint8_t* weights, const FeaturePlan& plan, std::int64_t begin,
           std::int64_t end, std::int64_t* rows, std::int64_t* starts) const;

 private:
  // Tables with rows in [begin, end), as indices.
  struct Range {
    std::size_t first;
    std::size_t last;
  };
  Range within(const std::byte* begin, const std::byte* end) const;

  RowOverlay& overlay_;
  const std::byte* const begin_;
  const std::byte* const end_;
  std::vector<const LaidTable*> tables_;
};

// Whether lookups of the state before may run while an overlay is shown.
enum class Shows { kAlone, kBeside };

class RowOverlay {
 public:
  // Throws std::invalid_argument where tables of one storage lie within each other.
  explicit RowOverlay(std::vector<NewRows> tables);
  ~RowOverlay();
  RowOverlay(const RowOverlay&) = delete;
  RowOverlay& operator=(const RowOverlay&) = delete;

  // Before show, beside serving: does a piece of some 100 microseconds of what that needs; false:
  // that was the last one. The tables' rows must not change from then on.
  bool keep();

  // Later overlays have higher numbers; above 0.
  std::int64_t number() const { return number_; }

  // From now on lookups read the new rows: those of threads that look up to this overlay.
  void show(Shows how = Shows::kAlone);
  // Whether no lookup has had a plan that the rows cannot be laid under.
  bool fits() const { return fits_.load(std::memory_order_acquire); }
  // From now on they read what the tables had, which those of them get back that were written.
  void take_back();

  // After show, beside lookups: writes some of the rows, which takes some 100 microseconds; false:
  // all are there. Lookups that have begun may still read the new rows here.
  bool write();

 private:
  friend class LaidStorage;

  // A piece of work over all rows.
  struct Turn {
    std::size_t table = 0;
    std::size_t row = 0;
  };
  template <typename Work>
  bool go_on(Turn& turn, Work work);
  void hide();
  bool write_some();
  void write_all();
  void write_all_or_throw();

  const std::int64_t number_;
  std::vector<std::unique_ptr<LaidTable>> tables_;
  std::vector<std::unique_ptr<LaidStorage>> storages_;
  Turn kept_;
  bool shown_ = false;
  std::atomic<bool> beside_ = false;
  std::atomic<bool> fits_ = true;
  std::mutex mutex_;
  Turn written_;                   // under the mutex
  std::atomic<bool> all_ = false;  // all are written
};

// Lookups of the calling thread see the overlays that are shown up to this number, until it is set
// again; a thread that has never set it sees all.
void look_up_to(std::int64_t number);

// What is laid over the storage that `weights` lies in; null: nothing. Its storage is that of
// whoever asks, so it stays until the lookup ends.
const LaidStorage* laid_over(const std::uint8_t* weights);

}  // namespace tessera
