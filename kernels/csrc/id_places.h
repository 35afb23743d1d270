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
inline constexpr int32_t kBeforeAllHours = -1;   // likewise

struct IdTable {
  int64_t* identities;  // [rows]
  int32_t* last_hours;  // [rows], of ids 0 or more; nullptr: no id expires
  int64_t rows;
  int64_t reserved;  // of each bucket
  int64_t probes;
  int64_t now;
  bool oldest;

  // The buckets of the whole table, of which `rows` from `first_row` on are here.
  const int64_t* sizes;   // [buckets]
  const int64_t* firsts;  // [buckets]
  int64_t buckets;
  int64_t first_row;
  int64_t range;  // of the ids of one bucket; 0: a bucket's ids are those with one remainder
  bool divides;   // whether the table has an id's place in its range, or its quotient
};

// The quotient rounded down, and its remainder, which is not negative; `divisor` is positive.
TESSERA_HOST_DEVICE int64_t floor_of(int64_t value, int64_t divisor) {
  const int64_t quotient = value / divisor;
  return quotient - static_cast<int64_t>(value % divisor < 0);
}

TESSERA_HOST_DEVICE int64_t remainder_of(int64_t value, int64_t divisor) {
  const int64_t remainder = value % divisor;
  return remainder < 0 ? remainder + divisor : remainder;
}

TESSERA_HOST_DEVICE int64_t bucket_number(const IdTable& table, int64_t value) {
  return remainder_of(table.range > 0 ? floor_of(value, table.range) : value, table.buckets);
}

// How the table has an id that was given as `value`.
TESSERA_HOST_DEVICE int64_t own_id(const IdTable& table, int64_t value) {
  if (!table.divides) return value;
  return table.range > 0 ? remainder_of(value, table.range) : floor_of(value, table.buckets);
}

// Whether two ids as they were given are one in the table.
TESSERA_HOST_DEVICE bool are_one_id(const IdTable& table, int64_t value, int64_t other) {
  if (value == other) return true;
  return table.divides && own_id(table, value) == own_id(table, other) &&
         bucket_number(table, value) == bucket_number(table, other);
}

// The ids of one call of learn_ids, and when they expire.
struct NewIds {
  const int64_t* ids;    // [count], as they were given
  const int32_t* hours;  // [count]; nullptr: all have `hour`
  const bool* let_in;    // [count]: an id gets a row if one of these says so; nullptr: all say so
  int64_t count;
  int32_t hour;
};

// The rows where an id may be: `count` from `first` on, and around, of which it looks at `probes`
// from `begin` on.
struct Bucket {
  int64_t first;
  int64_t count;
  int64_t begin;
  int64_t probes;
};

// Where the id that was given as `value` and has this hash may be, among the rows here; without
// rows where its bucket is not here, or has none for ids.
TESSERA_HOST_DEVICE Bucket bucket_of(const IdTable& table, int64_t value, uint64_t hash) {
  const int64_t number = bucket_number(table, value);
  const int64_t first = table.firsts[number] - table.first_row;
  const int64_t size = table.sizes[number];
  const int64_t count = size - table.reserved;
  if (count <= 0 || first < 0 || size > table.rows - first) return {0, 0, 0, 0};
  return {first, count, static_cast<int64_t>(hash % static_cast<uint64_t>(count)),
          table.probes < count ? table.probes : count};
}

// The row of an id that has none of its own: a reserved one, or else the first where it looks.
TESSERA_HOST_DEVICE int64_t shared_row(const IdTable& table, const Bucket& bucket, uint64_t hash) {
  if (table.reserved == 0) return bucket.first + bucket.begin;
  return bucket.first + bucket.count +
         static_cast<int64_t>(hash % static_cast<uint64_t>(table.reserved));
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

// Whether a row that has an id may be another's now, as far as the time goes.
TESSERA_HOST_DEVICE bool has_expired(const IdTable& table, int64_t row) {
  return table.last_hours != nullptr && table.last_hours[row] < table.now;
}

// The row that an id with this hour wants next after the one that it wanted by `last`, or kNoRow.
TESSERA_HOST_DEVICE Wish next_wish(const IdTable& table, const Bucket& bucket, int32_t hour,
                                   int64_t last) {
  Wish best{kNoRow, INT64_MAX};
  for (int64_t probe = table.oldest ? 0 : last + 1; probe < bucket.probes; ++probe) {
    const int64_t row = row_at(bucket, probe);
    const bool open = table.identities[row] == kNoId;
    if (!open && !(has_expired(table, row) && table.last_hours[row] < hour)) continue;
    const int64_t wish = wish_for(table, row, probe, open);
    if (wish <= last || wish >= best.wish) continue;
    best = {row, wish};
    if (open || !table.oldest) break;
  }
  return best;
}

// How many slots a hash table of `count` different things has, a power of two.
inline int64_t place_slots(int64_t count) {
  int64_t slots = 16;
  while (slots < 2 * count) slots *= 2;
  return slots;
}

}  // namespace tessera
