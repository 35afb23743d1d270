// Rows for new ids of a hash-based map on the CPU: a loop over the ids.  What the arguments mean is
// in training/modules/hash_places.py.
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "binding_places.h"

namespace tessera {
namespace {

using at::Tensor;

// The different ids of a call, in the order in which they came first.
class Ids {
  static constexpr int64_t kFree = -1;

 public:
  Ids(const int64_t* ids, const int64_t* firsts, int64_t count)
      : ids_(ids), firsts_(firsts), numbers_(static_cast<size_t>(count)) {
    slots_.assign(static_cast<size_t>(place_slots(count)), kFree);
    hashes_.reserve(static_cast<size_t>(count));
    came_.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) numbers_[static_cast<size_t>(i)] = number(i);
  }

  // The number of each id of the call.  Ids of two buckets are different.
  const std::vector<int64_t>& numbers() const { return numbers_; }
  // By number: the place in the call where it came first, and its hash.
  const std::vector<int64_t>& came() const { return came_; }
  const std::vector<uint64_t>& hashes() const { return hashes_; }

 private:
  int64_t number(int64_t i) {
    const uint64_t hash = hash_of(ids_[i]);
    const size_t mask = slots_.size() - 1;
    size_t slot = static_cast<size_t>(hash) & mask;
    while (slots_[slot] != kFree) {
      const auto found = static_cast<size_t>(slots_[slot]);
      const int64_t other = came_[found];
      if (ids_[other] == ids_[i] && firsts_[other] == firsts_[i]) return slots_[slot];
      slot = (slot + 1) & mask;
    }
    slots_[slot] = static_cast<int64_t>(came_.size());
    came_.push_back(i);
    hashes_.push_back(hash);
    return slots_[slot];
  }

  const int64_t* ids_;
  const int64_t* firsts_;
  std::vector<int64_t> numbers_;
  std::vector<int64_t> slots_;
  std::vector<int64_t> came_;
  std::vector<uint64_t> hashes_;
};

std::tuple<Tensor, Tensor> place_ids(const Tensor& identities, const Tensor& ids,
                                     const Tensor& sizes, const Tensor& firsts, int64_t reserved,
                                     int64_t probes, const std::optional<Tensor>& last_hours,
                                     const std::optional<Tensor>& hours, int64_t now, bool oldest) {
  const int64_t count = ids.numel();
  TORCH_CHECK(identities.device().is_cpu(), "identities: the CPU is needed, got ",
              identities.device());
  check_places(identities, ids, sizes, firsts, reserved, probes, last_hours, hours);
  const IdTable table = table_of(identities, reserved, probes, last_hours, now, oldest);
  const int32_t* const of_ids = hours.has_value() ? hours->const_data_ptr<int32_t>() : nullptr;
  const int64_t* const id = ids.const_data_ptr<int64_t>();
  const int64_t* const size = sizes.const_data_ptr<int64_t>();
  const int64_t* const first = firsts.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(is_within(table, first[i], size[i]), "sizes and firsts: entry ", i, " has ",
                size[i], " rows from ", first[i], " on, ", reserved,
                " of them reserved; the table has ", table.rows);
  }
  const Ids different(id, first, count);
  const auto unique = different.came().size();
  std::vector<int32_t> latest;
  if (of_ids != nullptr) {
    latest.assign(unique, std::numeric_limits<int32_t>::min());
    for (int64_t i = 0; i < count; ++i) {
      auto& hour = latest[static_cast<size_t>(different.numbers()[static_cast<size_t>(i)])];
      hour = std::max(hour, of_ids[i]);
    }
  }
  std::vector<int64_t> given(unique);
  std::vector<int64_t> taken;
  for (size_t number = 0; number < unique; ++number) {
    const int64_t place = different.came()[number];
    const Bucket bucket = bucket_of(table, first[place], size[place], different.hashes()[number]);
    const int32_t hour = of_ids == nullptr ? 0 : latest[number];
    const int64_t row = next_wish(table, bucket, hour, kBeforeAllWishes).row;
    given[number] = row;
    if (row == kNoRow) continue;
    if (table.identities[row] != kNoId) taken.push_back(row);
    table.identities[row] = id[place];
    if (table.last_hours != nullptr) table.last_hours[row] = hour;
  }
  Tensor found = at::empty({count}, ids.options());
  int64_t* const out = found.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    out[i] = given[static_cast<size_t>(different.numbers()[static_cast<size_t>(i)])];
  }
  Tensor evicted = at::empty({static_cast<int64_t>(taken.size())}, ids.options());
  std::copy(taken.begin(), taken.end(), evicted.mutable_data_ptr<int64_t>());
  return {found, evicted};
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("place_ids", tessera::place_ids); }
