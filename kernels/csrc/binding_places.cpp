// Rows of ids in a hash-based map on the CPU, where new ones get theirs in a loop.  What the
// arguments mean is in training/modules/hash_places.py.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "binding_places.h"

namespace tessera {
namespace {

using at::Tensor;

// What is known of an id after it was looked up.
enum class Standing : uint8_t {
  kKnown,     // the row is its own
  kShares,    // the row is one that it shares, now and later
  kMayBeNew,  // likewise, and there may be a row for it
  kOutside,   // its bucket is not here
};

constexpr int64_t kChunk = 2048;  // ids that one thread looks up at least
constexpr size_t kAhead = 16;     // ids whose rows are fetched while others are looked up

struct Asked {
  int64_t id;
  uint64_t hash;
  Bucket bucket;
};

// The first of `count` rows that has the id, or kNoRow; sets *open if one has none.
int64_t row_among(const int64_t* identities, int64_t first, int64_t count, int64_t id, bool* open) {
  bool is_open = false;
  for (int64_t row = first; row < first + count; ++row) {
    if (identities[row] == id) return row;
    is_open |= identities[row] == kNoId;
  }
  *open |= is_open;
  return kNoRow;
}

Standing look_up(const IdTable& table, const Asked& asked, int64_t* row) {
  const Bucket& bucket = asked.bucket;
  *row = kNoRow;
  if (bucket.count == 0) return Standing::kOutside;
  *row = shared_row(table, bucket, asked.hash);
  if (asked.id == kNoId) return Standing::kShares;
  const int64_t straight = std::min(bucket.probes, bucket.count - bucket.begin);
  bool open = false;
  int64_t own = row_among(table.identities, bucket.first + bucket.begin, straight, asked.id, &open);
  if (own == kNoRow) {
    own = row_among(table.identities, bucket.first, bucket.probes - straight, asked.id, &open);
  }
  if (own != kNoRow) {
    *row = own;
    return Standing::kKnown;
  }
  for (int64_t probe = 0; !open && probe < bucket.probes; ++probe) {
    open = has_expired(table, row_at(bucket, probe));
  }
  return open ? Standing::kMayBeNew : Standing::kShares;
}

// Looks up every id: rows here, and how each stands.
void look_up_all(const IdTable& table, const int64_t* ids, int64_t count, int64_t* rows,
                 Standing* standings) {
  at::parallel_for(0, count, kChunk, [&](int64_t begin, int64_t end) {
    std::array<Asked, kAhead> asked;
    for (int64_t from = begin; from < end; from += kAhead) {
      const auto some = static_cast<size_t>(std::min<int64_t>(kAhead, end - from));
      for (size_t i = 0; i < some; ++i) {
        const int64_t value = ids[from + static_cast<int64_t>(i)];
        const int64_t id = own_id(table, value);
        const uint64_t hash = hash_of(id);
        asked[i] = {id, hash, bucket_of(table, value, hash)};
        __builtin_prefetch(table.identities + asked[i].bucket.first + asked[i].bucket.begin);
      }
      for (size_t i = 0; i < some; ++i) {
        const int64_t at = from + static_cast<int64_t>(i);
        standings[at] = look_up(table, asked[i], rows + at);
      }
    }
  });
}

// The rows of the whole table, of rows here.
void count_from_its_beginning(const IdTable& table, int64_t* rows, int64_t count) {
  if (table.first_row == 0) return;
  for (int64_t i = 0; i < count; ++i) rows[i] += table.first_row;
}

// The different ids among some of a call's, in the order in which they came first.
class Ids {
  static constexpr int64_t kFree = -1;

 public:
  // `places` are theirs in the call, ascending.
  Ids(const IdTable& table, const int64_t* ids, const std::vector<int64_t>& places)
      : table_(table), ids_(ids) {
    slots_.assign(static_cast<size_t>(place_slots(static_cast<int64_t>(places.size()))), kFree);
    numbers_.reserve(places.size());
    for (const int64_t place : places) numbers_.push_back(number(place));
  }

  // The number of the id at each of `places`.
  const std::vector<int64_t>& numbers() const { return numbers_; }
  // By number: the place in the call where it came first, and its hash.
  const std::vector<int64_t>& came() const { return came_; }
  const std::vector<uint64_t>& hashes() const { return hashes_; }

 private:
  int64_t number(int64_t place) {
    const uint64_t hash = hash_of(own_id(table_, ids_[place]));
    const size_t mask = slots_.size() - 1;
    size_t slot = static_cast<size_t>(hash) & mask;
    while (slots_[slot] != kFree) {
      const int64_t other = came_[static_cast<size_t>(slots_[slot])];
      if (are_one_id(table_, ids_[other], ids_[place])) return slots_[slot];
      slot = (slot + 1) & mask;
    }
    slots_[slot] = static_cast<int64_t>(came_.size());
    came_.push_back(place);
    hashes_.push_back(hash);
    return slots_[slot];
  }

  const IdTable& table_;
  const int64_t* ids_;
  std::vector<int64_t> numbers_;
  std::vector<int64_t> slots_;
  std::vector<int64_t> came_;
  std::vector<uint64_t> hashes_;
};

// Gives rows to the ids at `places`, which have none, and writes those that got one; returns the
// rows that were other ids' before.
std::vector<int64_t> place_new(const IdTable& table, const NewIds& given,
                               const std::vector<int64_t>& places, int64_t* rows) {
  const Ids different(table, given.ids, places);
  const size_t unique = different.came().size();
  std::vector<int32_t> latest(unique, given.hour);
  std::vector<uint8_t> let_in(unique, given.let_in == nullptr ? 1 : 0);
  if (given.hours != nullptr) std::fill(latest.begin(), latest.end(), kBeforeAllHours);
  for (size_t i = 0; i < places.size(); ++i) {
    const auto number = static_cast<size_t>(different.numbers()[i]);
    if (given.hours != nullptr) latest[number] = std::max(latest[number], given.hours[places[i]]);
    if (given.let_in != nullptr && given.let_in[places[i]]) let_in[number] = 1;
  }
  std::vector<int64_t> got(unique, kNoRow);
  std::vector<int64_t> taken;
  for (size_t number = 0; number < unique; ++number) {
    if (let_in[number] == 0) continue;
    const int64_t value = given.ids[different.came()[number]];
    const Bucket bucket = bucket_of(table, value, different.hashes()[number]);
    const int64_t row = next_wish(table, bucket, latest[number], kBeforeAllWishes).row;
    if (row == kNoRow) continue;
    got[number] = row;
    if (table.identities[row] != kNoId) taken.push_back(row);
    table.identities[row] = own_id(table, value);
    if (table.last_hours != nullptr) table.last_hours[row] = latest[number];
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const int64_t row = got[static_cast<size_t>(different.numbers()[i])];
    if (row != kNoRow) rows[places[i]] = row;
  }
  return taken;
}

void check_cpu(const Tensor& identities) {
  TORCH_CHECK(identities.device().is_cpu(), "identities: the CPU is needed, got ",
              identities.device());
}

void check_standings(const IdTable& table, const std::vector<Standing>& standings) {
  const auto outside = std::find(standings.begin(), standings.end(), Standing::kOutside);
  TORCH_CHECK(outside == standings.end(), "ids: the bucket of entry ", outside - standings.begin(),
              " has no rows for ids among those from ", table.first_row, " to ",
              table.first_row + table.rows - 1, ", of which ", table.reserved,
              " of a bucket are reserved");
}

Tensor find_ids(const Tensor& identities, const Tensor& ids, const Tensor& sizes,
                const Tensor& firsts, int64_t first_row, int64_t range, bool divides,
                int64_t reserved, int64_t probes) {
  check_cpu(identities);
  const IdTable table =
      table_of(identities, ids, sizes, firsts, first_row, range, divides, reserved, probes);
  const int64_t count = ids.numel();
  Tensor found = at::empty({count}, ids.options());
  auto* const rows = found.mutable_data_ptr<int64_t>();
  std::vector<Standing> standings(static_cast<size_t>(count));
  look_up_all(table, ids.const_data_ptr<int64_t>(), count, rows, standings.data());
  check_standings(table, standings);
  count_from_its_beginning(table, rows, count);
  return found;
}

std::tuple<Tensor, Tensor> learn_ids(const Tensor& identities, const Tensor& ids,
                                     const Tensor& sizes, const Tensor& firsts, int64_t first_row,
                                     int64_t range, bool divides, int64_t reserved, int64_t probes,
                                     const std::optional<Tensor>& last_hours,
                                     const std::optional<Tensor>& hours, int64_t hour, int64_t now,
                                     bool oldest, const std::optional<Tensor>& let_in) {
  check_cpu(identities);
  IdTable table =
      table_of(identities, ids, sizes, firsts, first_row, range, divides, reserved, probes);
  const NewIds given = new_ids_of(table, ids, last_hours, hours, hour, now, oldest, let_in);
  Tensor found = at::empty({given.count}, ids.options());
  auto* const rows = found.mutable_data_ptr<int64_t>();
  std::vector<Standing> standings(static_cast<size_t>(given.count));
  look_up_all(table, given.ids, given.count, rows, standings.data());
  check_standings(table, standings);
  std::vector<int64_t> places;
  for (int64_t i = 0; i < given.count; ++i) {
    const Standing standing = standings[static_cast<size_t>(i)];
    if (standing == Standing::kMayBeNew) places.push_back(i);
    if (standing != Standing::kKnown || table.last_hours == nullptr) continue;
    int32_t& last = table.last_hours[rows[i]];
    last = std::max(last, given.hours == nullptr ? given.hour : given.hours[i]);
  }
  std::vector<int64_t> taken;
  if (!places.empty()) taken = place_new(table, given, places, rows);
  count_from_its_beginning(table, rows, given.count);
  const auto evicted = static_cast<int64_t>(taken.size());
  count_from_its_beginning(table, taken.data(), evicted);
  Tensor before = at::empty({evicted}, ids.options());
  std::copy(taken.begin(), taken.end(), before.mutable_data_ptr<int64_t>());
  return {found, before};
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("find_ids", tessera::find_ids);
  m.impl("learn_ids", tessera::learn_ids);
}
