// Small batches: as many threads on a bag as its row has words, so that a long bag ends early.
//
// A group of `Lanes` threads (a whole or half a warp) reads a row of one byte columns, four columns
// each, and owns one bag.  It asks for 16 rows at a time, the ids of which its lanes read side by
// side, up to `kSmallDepth` times ahead.  With a few thousand bags there are threads to spare, and
// what counts is how soon the longest bag is done: its loads depend on each other only through the
// ids, and each row costs a thread 20 instructions instead of 60.
//
// Sums are those of cuda_express.cuh, bit for bit.
#pragma once

#include "cuda_express.cuh"

namespace tessera {
namespace {

constexpr int kSmallThreads = 128;
constexpr int kSmallChunk = 16;      // rows asked for together
constexpr int kSmallDepth = 3;       // chunks in flight
constexpr int64_t kSmallRounds = 2;  // of resident threads, up to which a batch is small
constexpr int kSmallSlots = kSmallChunk * kSmallDepth;
constexpr int kSmallRowBytes = kSmallSlots * kSmallThreads * 4;

// Shared memory of a block, bytes: rows, then a scale per row of each group.
constexpr int small_bytes(Scales scales, int lanes) {
  return kSmallRowBytes + (scales == Scales::kRow ? kSmallSlots * (kSmallThreads / lanes) * 4 : 0);
}

template <int64_t T, Scales S, Ids I, int Lanes, bool Wide>
__global__ void __launch_bounds__(kSmallThreads, 8)
    lookup_small_kernel(const __grid_constant__ CudaLookup job) {
  static_assert(Lanes == 16 || Lanes == 32, "a chunk's ids are read by 16 lanes");
  constexpr int kColumns = 4;
  constexpr int kGroups = kSmallThreads / Lanes;
  constexpr bool kHasBias = S != Scales::kBook;
  extern __shared__ __align__(kRingAlignment) uint8_t ring[];
  __shared__ float books[kSmallThreads / 32][kBookScales];
  if (blockIdx.y == job.features) {
    copy_dense(job);
    return;
  }
  const int feature = static_cast<int>(blockIdx.y);
  const FeaturePlan& plan = job.plan[feature];
  const int lane = static_cast<int>(threadIdx.x) % Lanes;
  const int group = static_cast<int>(threadIdx.x) / Lanes;
  const unsigned mask = Lanes == 32 ? ~0u : 0xffffu << (threadIdx.x % 32 / 16 * 16);
  const int bag = static_cast<int>(blockIdx.x) * kGroups + group;
  const bool works = bag < job.batch;
  int64_t begin = 0;
  int count = 0;
  if (works) {
    const int at = feature * static_cast<int>(job.batch) + bag;
    begin = load_offset(job, at);
    count = static_cast<int>(max(load_offset(job, at + 1) - begin, int64_t{0}));
  }
  if (!express_serves<T, S, I, Lanes / 4>(job, plan)) {
    stream_bags_slowly(job, plan, feature, kGroups);
    return;
  }
  const uint8_t* const scales = job.weights + plan.scale_offset;
  float* const book = books[threadIdx.x / 32];
  if constexpr (S == Scales::kBook) load_book(scales, book);
  if (!works) return;

  const uint8_t* const ids = static_cast<const uint8_t*>(job.indices) + begin * (Wide ? 8 : 4);
  const uint8_t* const data = job.weights + plan.data_offset + lane * kColumns;
  const uint32_t rows = static_cast<uint32_t>(plan.rows);
  const uint32_t row_stride = static_cast<uint32_t>(plan.row_stride);
  const uint32_t scale_stride = static_cast<uint32_t>(plan.scale_stride);
  const int scale_shift = min(static_cast<int>(plan.scale_shift), 31);
  float2 pair = make_float2(1.0f, 0.0f);
  if constexpr (S == Scales::kOne) pair = load_scale(plan, scales, 0);
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(ring);
  const uint8_t* const my_scales = ring + kSmallRowBytes + group * kSmallSlots * 4;
  const uint32_t slot = shared_address(ring + threadIdx.x * 4);
  const int chunk_lane = lane % kSmallChunk;
  RawId<Wide> id{};

  const auto load_ids = [&](int first) {
    if (first + chunk_lane < count) id.load(ids, first + chunk_lane);
  };
  const auto issue = [&](int first, int stage) {
    const uint32_t my_row = I == Ids::kHashed ? hashed_row(plan, id.value()) : id.nearest_row(rows);
    if constexpr (S == Scales::kRow) {
      if (lane == chunk_lane && first + chunk_lane < count) {
        copy_async<4>(shared_address(my_scales + (stage * kSmallChunk + chunk_lane) * 4),
                      scales + static_cast<uint64_t>(my_row >> scale_shift) * scale_stride);
      }
    }
    if (first < count) {
#pragma unroll
      for (int k = 0; k < kSmallChunk; ++k) {
        const uint32_t row = __shfl_sync(mask, my_row, k, Lanes);
        if (first + k < count) {
          copy_async<4>(slot + (stage * kSmallChunk + k) * (kSmallThreads * 4),
                        data + static_cast<uint64_t>(row) * row_stride);
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float acc[kColumns] = {};
  float bias = 0.0f;
  const auto add_row = [&](int place) {
    const uint32_t at = place * kSmallThreads + threadIdx.x;
    const uint32_t word = words[at];
    if constexpr (S == Scales::kBook) pair.x = book[block_code(words[at & ~3u])];
    if constexpr (S == Scales::kRow) {
      pair = half_pair(*reinterpret_cast<const uint32_t*>(my_scales + place * 4));
    }
    if constexpr (kHasBias) bias = __fadd_rn(bias, pair.y);
    float values[kColumns];
    bytes_to_floats<T == kBlockInt8 ? 128 : 0>(word, values);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) acc[c] = fmaf(pair.x, values[c], acc[c]);
  };

  load_ids(0);
#pragma unroll
  for (int stage = 0; stage < kSmallDepth - 1; ++stage) {
    issue(stage * kSmallChunk, stage);
    load_ids((stage + 1) * kSmallChunk);
  }
  int stage = 0;
  for (int first = 0; first < count; first += kSmallChunk) {
    // The chunk that goes into the slots which were read last.
    issue(first + (kSmallDepth - 1) * kSmallChunk, stage == 0 ? kSmallDepth - 1 : stage - 1);
    load_ids(first + kSmallDepth * kSmallChunk);
    asm volatile("cp.async.wait_group %0;" ::"n"(kSmallDepth - 1) : "memory");
    __syncwarp(mask);  // scales and codes were copied by other lanes
    const int left = min(count - first, kSmallChunk);
    if (left == kSmallChunk) {
#pragma unroll
      for (int k = 0; k < kSmallChunk; ++k) add_row(stage * kSmallChunk + k);
    } else {
#pragma unroll 1
      for (int k = 0; k < left; ++k) add_row(stage * kSmallChunk + k);
    }
    __syncwarp(mask);  // nobody reads what the next chunk overwrites
    stage = stage + 1 == kSmallDepth ? 0 : stage + 1;
  }
  Sum<kColumns> sum;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum.acc[c] = acc[c];
  sum.bias = bias;
  const int64_t out = bag * job.out_width + plan.out_column + lane * kColumns;
  if (job.out_type == OutType::kFloat16) {
    sum.template write_half<OutType::kFloat16>(job, out, kHasBias);
  } else {
    sum.write(job, out, kColumns, true, kHasBias, 1.0f);
  }
}

}  // namespace
}  // namespace tessera
