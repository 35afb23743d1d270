// Where an id of a hash-based map may be, and which row it wants: the same on CPUs and GPUs.  What
// the numbers mean is in training/modules/hash_places.py.
#pragma once

#include <cstdint>

#include "ids.h"

namespace tessera {

TESSERA_HOST_DEVICE uint64_t rotated(uint64_t word, int bits) {
  return word << bits | word >> (64 - bits);
}

// MurmurHash3's 128-bit variant for 64-bit machines (Austin Appleby, public domain) of the words
// (id, 0); its two words are joined by exclusive or.
TESSERA_HOST_DEVICE uint64_t hash_of(int64_t id) {
  uint64_t word = rotated(static_cast<uint64_t>(id) * 0x87C37B91114253D5, 31) * 0x4CF5AD432745937F;
  uint64_t first = rotated(word, 27) * 5 + 0x52DCE729;
  uint64_t second = (first * 5 + 0x38495AB5) ^ 16;
  first = (first ^ 16) + second;
  second = fmix64(second + first);
  first = fmix64(first) + second;
  return first ^ (second + first);
}

inline constexpr int64_t kNoId = -1;
inline constexpr int64_t kNoRow = -1;
inline constexpr int64_t kBeforeAllWishes = -1;  // these are 0 or more

struct IdTable {
  int64_t* identities;  // [rows]
  int32_t* last_hours;  // [rows], of ids 0 or more; nullptr: no id expires
  int64_t rows;
  int64_t reserved;  // of each bucket
  int64_t probes;
  int64_t now;
  bool oldest;
};

// The rows where an id may be: `count` from `first` on, and around, of which it looks at `probes`
// from `begin` on.
struct Bucket {
  int64_t first;
  int64_t count;
  int64_t begin;
  int64_t probes;
};

// Whether a bucket of `size` rows from `first` on lies in the table and has rows for ids.
TESSERA_HOST_DEVICE bool is_within(const IdTable& table, int64_t first, int64_t size) {
  return size > table.reserved && first >= 0 && size <= table.rows - first;
}

// `hash` is that of the id.
TESSERA_HOST_DEVICE Bucket bucket_of(const IdTable& table, int64_t first, int64_t size,
                                     uint64_t hash) {
  const int64_t count = size - table.reserved;
  return {first, count, static_cast<int64_t>(hash % static_cast<uint64_t>(count)),
          table.probes < count ? table.probes : count};
}

TESSERA_HOST_DEVICE int64_t row_at(const Bucket& bucket, int64_t probe) {
  const int64_t place = bucket.begin + probe;
  return bucket.first + (place < bucket.count ? place : place - bucket.count);
}

TESSERA_HOST_DEVICE int64_t probe_at(const Bucket& bucket, int64_t row) {
  const int64_t place = row - bucket.first - bucket.begin;
  return place < 0 ? place + bucket.count : place;
}

// How much an id wants a row that is open, or else an expired id's; less is more.
TESSERA_HOST_DEVICE int64_t wish_for(const IdTable& table, int64_t row, int64_t probe, bool open) {
  if (open || !table.oldest) return probe;
  return (static_cast<int64_t>(table.last_hours[row]) + 1) * table.probes + probe;
}

struct Wish {
  int64_t row;
  int64_t wish;
};

// The row that an id with this hour wants next after the one that it wanted by `last`, or kNoRow.
TESSERA_HOST_DEVICE Wish next_wish(const IdTable& table, const Bucket& bucket, int32_t hour,
                                   int64_t last) {
  Wish best{kNoRow, INT64_MAX};
  for (int64_t probe = table.oldest ? 0 : last + 1; probe < bucket.probes; ++probe) {
    const int64_t row = row_at(bucket, probe);
    const bool open = table.identities[row] == kNoId;
    if (!open) {
      if (table.last_hours == nullptr) continue;
      const int64_t before = table.last_hours[row];
      if (before >= table.now || before >= hour) continue;
    }
    const int64_t wish = wish_for(table, row, probe, open);
    if (wish <= last || wish >= best.wish) continue;
    best = {row, wish};
    if (open || !table.oldest) break;
  }
  return best;
}

// How many slots a table of the different ids among `count` has, a power of two.
inline int64_t place_slots(int64_t count) {
  int64_t slots = 16;
  while (slots < 2 * count) slots *= 2;
  return slots;
}

}  // namespace tessera
