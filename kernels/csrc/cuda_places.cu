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
#include "id_hash.h"

namespace tessera {
namespace {

constexpr int kBlock = 128;
constexpr int64_t kNoId = -1;
constexpr int64_t kNoRow = -1;
constexpr int64_t kBeforeAll = -1;  // wishes are 0 or more

// The rows where an id may be: `count` from `first` on, and around, of which it looks at `probes`
// from `begin` on.  An entry outside of the table has none.
struct Bucket {
  int64_t first;
  int64_t count;
  int64_t begin;
  int64_t probes;

  __device__ int64_t row(int64_t probe) const {
    const int64_t place = begin + probe;
    return first + (place < count ? place : place - count);
  }

  __device__ int64_t probe_of(int64_t row) const {
    const int64_t place = row - first - begin;
    return place < 0 ? place + count : place;
  }
};

__device__ Bucket bucket_of(const CudaPlaces& job, int32_t i) {
  const int64_t first = job.firsts[i];
  const int64_t size = job.sizes[i];
  const int64_t count = size - job.reserved;
  if (count < 1 || first < 0 || size > job.rows - first) return {0, 1, 0, 0};
  const auto begin = static_cast<int64_t>(hash_of(job.ids[i]) % static_cast<uint64_t>(count));
  return {first, count, begin, job.probes < count ? job.probes : count};
}

// How much an id wants a row that is open, or has the hour of another id; less is more.
__device__ int64_t wish_for(const CudaPlaces& job, int64_t row, int64_t probe, bool open) {
  if (open || !job.oldest) return probe;
  return (static_cast<int64_t>(job.last_hours[row]) + 1) * job.probes + probe;
}

struct Wish {
  int64_t row;
  int64_t wish;
};

// The row that an id wants next after the one that it wanted by `last`.
__device__ Wish next_wish(const CudaPlaces& job, const Bucket& bucket, int32_t hour, int64_t last) {
  Wish best{kNoRow, INT64_MAX};
  for (int64_t probe = job.oldest ? 0 : last + 1; probe < bucket.probes; ++probe) {
    const int64_t row = bucket.row(probe);
    const bool open = job.identities[row] == kNoId;
    if (!open) {
      if (job.last_hours == nullptr) continue;
      const int64_t before = job.last_hours[row];
      if (before >= job.now || before >= hour) continue;
    }
    const int64_t wish = wish_for(job, row, probe, open);
    if (wish <= last || wish >= best.wish) continue;
    best = {row, wish};
    if (open || !job.oldest) break;
  }
  return best;
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
  Bucket bucket = bucket_of(job, mine);
  int32_t hour = job.slot_hours[job.slots[mine]];
  int64_t last = kBeforeAll;
  while (true) {
    const Wish next = next_wish(job, bucket, hour, last);
    if (next.row == kNoRow) return;
    last = next.wish;
    const int32_t other = atomicMin(job.claims + next.row, mine);
    if (other < mine) continue;
    if (other == kUnclaimed) return;
    mine = other;  // it was driven out
    bucket = bucket_of(job, mine);
    hour = job.slot_hours[job.slots[mine]];
    last = wish_for(job, next.row, bucket.probe_of(next.row), job.identities[next.row] == kNoId);
  }
}

__global__ void __launch_bounds__(kBlock) write_kernel(CudaPlaces job) {
  const int64_t i = this_thread();
  if (i >= job.count) return;
  job.evicted[i] = kNoRow;
  if (!came_first(job, i)) return;
  const int32_t slot = job.slots[i];
  const Bucket bucket = bucket_of(job, static_cast<int32_t>(i));
  int64_t got = kNoRow;
  for (int64_t probe = 0; probe < bucket.probes && got == kNoRow; ++probe) {
    if (job.claims[bucket.row(probe)] == i) got = bucket.row(probe);
  }
  job.slot_rows[slot] = got;
  if (got == kNoRow) return;
  if (job.identities[got] != kNoId) job.evicted[i] = got;
  job.identities[got] = job.ids[i];
  if (job.last_hours != nullptr) job.last_hours[got] = job.slot_hours[slot];
}

__global__ void __launch_bounds__(kBlock) found_kernel(CudaPlaces job) {
  const int64_t i = this_thread();
  if (i < job.count) job.found[i] = job.slot_rows[job.slots[i]];
}

}  // namespace

int64_t place_slots(int64_t count) {
  int64_t slots = 16;
  while (slots < 2 * count) slots *= 2;
  return slots;
}

cudaError_t launch_places(const CudaPlaces& job, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((job.count + kBlock - 1) / kBlock);
  slots_kernel<<<blocks, kBlock, 0, stream>>>(job, place_slots(job.count) - 1);
  claims_kernel<<<blocks, kBlock, 0, stream>>>(job);
  write_kernel<<<blocks, kBlock, 0, stream>>>(job);
  found_kernel<<<blocks, kBlock, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace tessera
