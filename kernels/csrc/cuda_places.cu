// Rows for new ids of a hash-based map, as a loop over the ids gives them, by all ids at once.
//
// An id prefers rows in the order in which it would take them: open (and expired) ones as it probes
// them, or with `oldest` the expired ones after the open ones, by age.  Every row prefers the id
// that came first.  All ids claim the row that they prefer at once; a row keeps the earliest, by an
// atomic minimum, and the thread whose claim drove another id out goes on for that one.  As all
// rows have the same preference, this ends with what the ids get if they choose one after another
// (D. Gale, L. Shapley, College admissions and the stability of marriage, 1962), whatever the order
// in which threads run.  An id that comes several times is found by a table of slots first, and
// claims by the place where it came first, with its latest hour.
#include <cstdint>

#include "cuda_places.h"

namespace tessera {
namespace {

constexpr int kBlock = 128;

// The bucket of the id at `i`, which has no rows where it does not lie in the table.
__device__ Bucket bucket_at(const CudaPlaces& job, int64_t i) {
  const int64_t first = job.firsts[i];
  const int64_t size = job.sizes[i];
  if (!is_within(job.table, first, size)) return {0, 1, 0, 0};
  return bucket_of(job.table, first, size, hash_of(job.ids[i]));
}

__device__ int64_t this_thread() { return static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; }

__global__ void __launch_bounds__(kBlock) slots_kernel(CudaPlaces job, int64_t mask) {
  const int64_t i = this_thread();
  if (i >= job.count) return;
  const int64_t id = job.ids[i];
  const int64_t first = job.firsts[i];
  auto slot = static_cast<int64_t>(hash_of(id)) & mask;
  for (;; slot = (slot + 1) & mask) {
    const int32_t other = atomicCAS(job.slot_ids + slot, -1, static_cast<int32_t>(i));
    if (other == -1 || (job.ids[other] == id && job.firsts[other] == first)) break;
  }
  job.slots[i] = static_cast<int32_t>(slot);
  atomicMin(job.slot_firsts + slot, static_cast<int32_t>(i));
  if (job.hours != nullptr) atomicMax(job.slot_hours + slot, job.hours[i]);
}

__device__ bool came_first(const CudaPlaces& job, int64_t i) {
  return i < job.count && job.slot_firsts[job.slots[i]] == i;
}

__global__ void __launch_bounds__(kBlock) claims_kernel(CudaPlaces job) {
  const int64_t i = this_thread();
  if (!came_first(job, i)) return;
  auto mine = static_cast<int32_t>(i);
  Bucket bucket = bucket_at(job, mine);
  int32_t hour = job.slot_hours[job.slots[mine]];
  int64_t last = kBeforeAllWishes;
  while (true) {
    const Wish next = next_wish(job.table, bucket, hour, last);
    if (next.row == kNoRow) return;
    last = next.wish;
    const int32_t other = atomicMin(job.claims + next.row, mine);
    if (other < mine) continue;
    if (other == kUnclaimed) return;
    mine = other;  // it was driven out
    bucket = bucket_at(job, mine);
    hour = job.slot_hours[job.slots[mine]];
    last = wish_for(job.table, next.row, probe_at(bucket, next.row),
                    job.table.identities[next.row] == kNoId);
  }
}

__global__ void __launch_bounds__(kBlock) write_kernel(CudaPlaces job) {
  const int64_t i = this_thread();
  if (i >= job.count) return;
  job.evicted[i] = kNoRow;
  if (!came_first(job, i)) return;
  const int32_t slot = job.slots[i];
  const Bucket bucket = bucket_at(job, i);
  int64_t got = kNoRow;
  for (int64_t probe = 0; probe < bucket.probes && got == kNoRow; ++probe) {
    const int64_t row = row_at(bucket, probe);
    if (job.claims[row] == i) got = row;
  }
  job.slot_rows[slot] = got;
  if (got == kNoRow) return;
  if (job.table.identities[got] != kNoId) job.evicted[i] = got;
  job.table.identities[got] = job.ids[i];
  if (job.table.last_hours != nullptr) job.table.last_hours[got] = job.slot_hours[slot];
}

__global__ void __launch_bounds__(kBlock) found_kernel(CudaPlaces job) {
  const int64_t i = this_thread();
  if (i < job.count) job.found[i] = job.slot_rows[job.slots[i]];
}

}  // namespace

cudaError_t launch_places(const CudaPlaces& job, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((job.count + kBlock - 1) / kBlock);
  slots_kernel<<<blocks, kBlock, 0, stream>>>(job, place_slots(job.count) - 1);
  claims_kernel<<<blocks, kBlock, 0, stream>>>(job);
  write_kernel<<<blocks, kBlock, 0, stream>>>(job);
  found_kernel<<<blocks, kBlock, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace tessera
