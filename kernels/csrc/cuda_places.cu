// Rows of ids in a hash-based map: those that have one, and those that get one as a loop over the
// ids gives them, by all ids at once.  The host waits for none of it.
//
// Four kernels, each with a thread for an id, or in the third for a slot:
//   1. An id looks for its row.  One that has none but may get one goes into a hash table of such
//      ids, which holds the place in the call where each came first, and its latest hour.
//   2. New ids claim rows.  An id prefers rows in the order in which it would take them: open (and
//      expired) ones as it probes them, or with `oldest` the expired ones after the open ones, by
//      age.  Every row prefers the id that came first.  All ids claim the row that they prefer at
//      once; a row keeps the earliest, by an atomic minimum, and the thread whose claim drove
//      another id out goes on for that one.  As all rows have the same preference, this ends with
//      what the ids get if they choose one after another (D. Gale, L. Shapley, College admissions
//      and the stability of marriage, 1962), whatever the order in which threads run.
//   3. Claimed rows are written.
//   4. Each occurrence of a new id reads what the id got.
//
// Claims are in a hash table by row, so that room and time go by the ids and not by the table.  It
// is never full: a row that is claimed stays so, and an id holds one at a time.
#include <cstdint>

#include "cuda_places.h"

namespace tessera {
namespace {

constexpr int kBlock = 128;
constexpr int32_t kNoSlot = -1;
constexpr int kAtOnce = 4;  // rows that an id reads before it compares: a sector of 32 bytes

__device__ int64_t this_thread() { return static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; }

__device__ int32_t hour_at(const NewIds& given, int64_t i) {
  return given.hours == nullptr ? given.hour : given.hours[i];
}

// The probe at which the bucket has the id, or -1; sets *open if one of its rows has none.
__device__ int64_t probe_of(const IdTable& table, const Bucket& bucket, int64_t id, bool* open) {
  for (int64_t from = 0; from < bucket.probes; from += kAtOnce) {
    int64_t there[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t last = bucket.probes - 1;
      there[j] = table.identities[row_at(bucket, from + j < last ? from + j : last)];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (there[j] == id) return from + j < bucket.probes ? from + j : bucket.probes - 1;
      *open |= there[j] == kNoId;
    }
  }
  return -1;
}

// A hash table's slot for the new id at `i`: its own, or that of an earlier thread for the same id.
__device__ int32_t slot_for(const CudaPlaces& job, int64_t i, uint64_t hash, int64_t mask) {
  const int64_t value = job.given.ids[i];
  auto slot = static_cast<int64_t>(hash) & mask;
  for (;; slot = (slot + 1) & mask) {
    const int32_t other = atomicCAS(job.room.slot_ids + slot, kNoSlot, static_cast<int32_t>(i));
    if (other == kNoSlot || are_one_id(job.table, value, job.given.ids[other])) break;
  }
  return static_cast<int32_t>(slot);
}

template <bool kLearns>
__global__ void __launch_bounds__(kBlock) look_up_kernel(CudaPlaces job, int64_t mask) {
  const int64_t i = this_thread();
  if (i >= job.given.count) return;
  const IdTable& table = job.table;
  const int64_t value = job.given.ids[i];
  const int64_t id = own_id(table, value);
  const uint64_t hash = hash_of(id);
  const Bucket bucket = bucket_of(table, value, hash);
  if constexpr (kLearns) {
    job.slots[i] = kNoSlot;
    job.evicted[i] = kNoRow;
  }
  if (bucket.count == 0) {
    job.rows[i] = kNoRow;
    return;
  }
  bool open = false;
  const int64_t probe = id == kNoId ? -1 : probe_of(table, bucket, id, &open);
  const int64_t row = probe < 0 ? shared_row(table, bucket, hash) : row_at(bucket, probe);
  job.rows[i] = row + table.first_row;
  if constexpr (kLearns) {
    if (id == kNoId) return;
    if (probe >= 0) {
      if (table.last_hours != nullptr) atomicMax(table.last_hours + row, hour_at(job.given, i));
      return;
    }
    // An hour that another thread raises meanwhile is one of an id that stays: too many go on here.
    for (int64_t at = 0; !open && at < bucket.probes; ++at) {
      open = has_expired(table, row_at(bucket, at));
    }
    if (!open) return;
    const int32_t slot = slot_for(job, i, hash, mask);
    job.slots[i] = slot;
    atomicMin(job.room.slot_firsts + slot, static_cast<uint32_t>(i));
    atomicMax(job.room.slot_hours + slot, hour_at(job.given, i));
    if (job.given.let_in != nullptr && job.given.let_in[i]) job.room.slot_let_in[slot] = 0;
  }
}

// Whether a row is to be found for the id at `i`, by the thread of that number.
__device__ bool asks_for_row(const CudaPlaces& job, int64_t i) {
  if (i >= job.given.count || job.slots[i] == kNoSlot) return false;
  const int32_t slot = job.slots[i];
  if (job.room.slot_firsts[slot] != i) return false;
  return job.given.let_in == nullptr || job.room.slot_let_in[slot] == 0;
}

// The slot of a row in the hash table of those that are claimed.
__device__ int64_t claim_of(const CudaPlaces& job, int64_t row, int64_t mask) {
  auto slot = static_cast<int64_t>(fmix64(static_cast<uint64_t>(row))) & mask;
  for (;; slot = (slot + 1) & mask) {
    const auto other = static_cast<int64_t>(
        atomicCAS(reinterpret_cast<unsigned long long*>(job.room.claimed + slot),
                  static_cast<unsigned long long>(kNoRow), static_cast<unsigned long long>(row)));
    if (other == kNoRow || other == row) return slot;
  }
}

__global__ void __launch_bounds__(kBlock) claims_kernel(CudaPlaces job, int64_t mask) {
  const int64_t i = this_thread();
  if (!asks_for_row(job, i)) return;
  const IdTable& table = job.table;
  int64_t mine = i;
  int64_t value = job.given.ids[mine];
  Bucket bucket = bucket_of(table, value, hash_of(own_id(table, value)));
  int32_t hour = job.room.slot_hours[job.slots[mine]];
  int64_t last = kBeforeAllWishes;
  while (true) {
    const Wish next = next_wish(table, bucket, hour, last);
    if (next.row == kNoRow) return;
    last = next.wish;
    const uint32_t other =
        atomicMin(job.room.claimers + claim_of(job, next.row, mask), static_cast<uint32_t>(mine));
    if (other < mine) continue;
    if (other == UINT32_MAX) return;
    mine = other;  // it was driven out
    value = job.given.ids[mine];
    bucket = bucket_of(table, value, hash_of(own_id(table, value)));
    hour = job.room.slot_hours[job.slots[mine]];
    last =
        wish_for(table, next.row, probe_at(bucket, next.row), table.identities[next.row] == kNoId);
  }
}

__global__ void __launch_bounds__(kBlock) write_kernel(CudaPlaces job, int64_t slots) {
  const int64_t claim = this_thread();
  if (claim >= slots || job.room.claimed[claim] == kNoRow) return;
  const int64_t row = job.room.claimed[claim];
  const uint32_t i = job.room.claimers[claim];
  const int32_t slot = job.slots[i];
  job.room.slot_rows[slot] = row;
  if (job.table.identities[row] != kNoId) job.evicted[i] = row + job.table.first_row;
  job.table.identities[row] = own_id(job.table, job.given.ids[i]);
  if (job.table.last_hours != nullptr) job.table.last_hours[row] = job.room.slot_hours[slot];
}

__global__ void __launch_bounds__(kBlock) read_kernel(CudaPlaces job) {
  const int64_t i = this_thread();
  if (i >= job.given.count || job.slots[i] == kNoSlot) return;
  const int64_t row = job.room.slot_rows[job.slots[i]];
  if (row != kNoRow) job.rows[i] = row + job.table.first_row;
}

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>((threads + kBlock - 1) / kBlock);
}

}  // namespace

cudaError_t launch_find(const CudaPlaces& job, cudaStream_t stream) {
  look_up_kernel<false><<<blocks_of(job.given.count), kBlock, 0, stream>>>(job, 0);
  return cudaGetLastError();
}

cudaError_t launch_learn(const CudaPlaces& job, cudaStream_t stream) {
  const unsigned blocks = blocks_of(job.given.count);
  const int64_t slots = place_slots(job.given.count);
  look_up_kernel<true><<<blocks, kBlock, 0, stream>>>(job, slots - 1);
  claims_kernel<<<blocks, kBlock, 0, stream>>>(job, slots - 1);
  write_kernel<<<blocks_of(slots), kBlock, 0, stream>>>(job, slots);
  read_kernel<<<blocks, kBlock, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace tessera
