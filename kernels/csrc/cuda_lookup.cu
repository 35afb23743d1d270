// Pooled and unpooled lookups of many tables in one launch.
//
// blockIdx.y picks a feature (in the plan's launch order), blockIdx.x a tile of its bags.  A row is
// read by a group of `lanes` neighbouring threads, 16 bytes each (8 of int4): 8 lanes for 128 int8
// columns.  A group owns `bags_per_group` neighbouring bags and streams over their ids, which lie
// side by side, so rows are in flight across the ends of bags and one-id bags are no special case.
//
// Rows travel by cp.async into a ring in shared memory, kRing rows ahead of the sum.  Each thread
// reads back only the bytes that it copied, so there is no barrier.  The ring is what registers
// could not hold: 8 rows x 16 bytes x 768 threads keep 96 KB in flight on a multiprocessor,
// where about 30 KB are needed to cover 4.2 TB/s times the latency of a random row.
//
// The sum is the CPU's, in its order: acc = fma(weight * scale, q, acc), bias apart.
#include <climits>

#include "cuda_decode.cuh"
#include "cuda_lookup.h"
#include "ids.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 3;  // 80 registers a thread: with 64 they spill
constexpr int kStep = 4;                     // ids issued together
constexpr int kRing = 8;                     // rows in flight of a group
constexpr int kMaxBagsPerGroup = 4;
constexpr int kRingBytes = kRing * kThreads * 16;
constexpr int kSharedBytes = kRingBytes + kRing * kThreads * 4;
static_assert(kSharedBytes <= 48 * 1024, "more would have to be asked for");

__device__ __forceinline__ int64_t load_integer(const void* values, int64_t at, bool wide) {
  return wide ? __ldg(static_cast<const int64_t*>(values) + at)
              : __ldg(static_cast<const int32_t*>(values) + at);
}

// An id as it was loaded.  Widening it at once would wait for the load; that happens when the id
// is used, one step later.
template <bool Wide>
struct RawId;

template <>
struct RawId<false> {
  int32_t bits;

  __device__ __forceinline__ void load(const uint8_t* ids, int at) {
    bits = __ldg(reinterpret_cast<const int32_t*>(ids) + at);
  }
  __device__ __forceinline__ int64_t value() const { return bits; }
  __device__ __forceinline__ uint32_t nearest_row(uint32_t rows) const {
    return static_cast<uint32_t>(min(max(bits, 0), static_cast<int>(rows) - 1));
  }
};

template <>
struct RawId<true> {
  int64_t bits;

  __device__ __forceinline__ void load(const uint8_t* ids, int at) {
    bits = __ldg(reinterpret_cast<const int64_t*>(ids) + at);
  }
  __device__ __forceinline__ int64_t value() const { return bits; }
  __device__ __forceinline__ uint32_t nearest_row(uint32_t rows) const {
    const uint32_t nearest = bits < 0 ? 0 : rows - 1;
    return static_cast<uint64_t>(bits) < rows ? static_cast<uint32_t>(bits) : nearest;
  }
};

// An offset, kept inside the ids whatever the caller sent.
__device__ __forceinline__ int64_t load_offset(const CudaLookup& job, int64_t bag) {
  const int64_t offset = load_integer(job.offsets, bag, job.wide_offsets);
  return min(max(offset, int64_t{0}), job.ids);
}

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

template <int Bytes>
__device__ __forceinline__ void copy_async(uint32_t to, const uint8_t* from) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Bytes)
                 : "memory");
  }
}

__device__ __forceinline__ float2 half_pair(uint32_t bits) {
  return make_float2(half_bits_to_float(bits & 0xffffu), half_bits_to_float(bits >> 16));
}

// Scale and bias of a row, of any type and alignment.
__device__ float2 load_scale(const FeaturePlan& plan, const uint8_t* scales, uint32_t row) {
  const uint8_t* at = scales + static_cast<int64_t>(row >> plan.scale_shift) * plan.scale_stride;
  if (plan.scale_type == kHalfScale) {
    return make_float2(decode_column(kFloat16, at, 0), decode_column(kFloat16, at, 1));
  }
  return make_float2(decode_column(kFloat32, at, 0), decode_column(kFloat32, at, 1));
}

// The row of a raw id or -1; counts it once per group when it is outside the table.
__device__ __forceinline__ int32_t resolve(const CudaLookup& job, const FeaturePlan& plan,
                                           int feature, int64_t id, bool counts) {
  bool outside;
  const int64_t row = resolve_id(id, plan.rows, plan.id_rule, plan.out_of_range,
                                 static_cast<uint64_t>(plan.reciprocal), &outside);
  if (outside && counts && job.outside != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(job.outside + feature), 1ULL);
  }
  return static_cast<int32_t>(row);
}

// What a feature asks of the inner loop.  Each mode is compiled for itself, so that the common
// ones keep everything in registers.
enum class Mode {
  kOneScale,  // ids are rows (clamped), no id weights, no counts; one scale for the table or none
  kRowScale,  // the same with fp16 scales per row or per few rows
  kGeneral,   // everything
};

// What writing a bag needs of the plan; in shared memory to keep it out of registers.
struct BagShape {
  int64_t out_column;
  int dim;
  int mean;
  int quantized;
  int vector_stores;
  int plain_half;  // fp16, sum pooling, whole shares, vector stores: the short way out
};

// How a group works on its bags.
struct Group {
  int lane;  // 0 .. lanes - 1
  int bag;   // the first bag
  int bags;  // how many, >= 1
  int64_t begin;  // where the ids of the first bag begin
  int count;      // ids of all bags
  // Where the first three bags end, from `begin`; the last bag takes the rest, whatever its end.
  int ends[kMaxBagsPerGroup - 1];

  // False: there is no bag for this group.
  __device__ __forceinline__ bool take(const CudaLookup& job, int feature, int64_t tile, int lanes,
                                       int bags_per_group) {
    lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    const int groups = kThreads / lanes;
    bag = (static_cast<int>(tile) * groups + static_cast<int>(threadIdx.x) / lanes) *
          bags_per_group;
    bags = min(static_cast<int>(job.batch) - bag, bags_per_group);
    if (bags <= 0) return false;
    const int first = feature * static_cast<int>(job.batch) + bag;
    begin = load_offset(job, first);
    const int64_t end = load_offset(job, first + bags);
#pragma unroll
    for (int k = 0; k < kMaxBagsPerGroup - 1; ++k) {
      ends[k] = INT_MAX;
      if (k + 1 < bags) ends[k] = static_cast<int>(load_offset(job, first + k + 1) - begin);
    }
    count = static_cast<int>(max(end - begin, int64_t{0}));
    return true;
  }
};

// One thread's columns of a bag: sum them up, then write them.
template <int C>
struct Sum {
  float acc[C];
  float bias;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < C; ++k) acc[k] = 0.0f;
    bias = 0.0f;
  }

  // The short way: fp16, all C columns, aligned.
  __device__ __forceinline__ void write_half(const CudaLookup& job, int64_t at, bool quantized) {
    uint16_t* out = static_cast<uint16_t*>(job.out) + at;
    const float add = quantized ? bias : 0.0f;
    uint32_t pairs[C / 2];
#pragma unroll
    for (int k = 0; k < C / 2; ++k) {
      pairs[k] = pack_pair(OutType::kFloat16, acc[2 * k] + add, acc[2 * k + 1] + add);
    }
    if constexpr (C == 4) {
      store_streaming(out, pairs[0], pairs[1]);
    } else {
#pragma unroll
      for (int k = 0; k < C / 2; k += 4) {
        store_streaming(out + 2 * k, pairs[k], pairs[k + 1], pairs[k + 2], pairs[k + 3]);
      }
    }
    clear();
  }

  __device__ __forceinline__ void write(const CudaLookup& job, int64_t at, int columns,
                                        bool vector_stores, bool quantized, float divisor) {
#pragma unroll
    for (int k = 0; k < C; ++k) {
      if (quantized) acc[k] += bias;
      if (divisor > 1.0f) acc[k] = __fdiv_rn(acc[k], divisor);
    }
    if (!vector_stores || columns < C) {
#pragma unroll
      for (int k = 0; k < C; ++k) {
        if (k < columns) store_element(job.out_type, job.out, at + k, acc[k]);
      }
    } else if (job.out_type == OutType::kFloat32) {
      float* out = static_cast<float*>(job.out) + at;
#pragma unroll
      for (int k = 0; k < C; k += 4) {
        store_streaming(out + k, __float_as_uint(acc[k]), __float_as_uint(acc[k + 1]),
                        __float_as_uint(acc[k + 2]), __float_as_uint(acc[k + 3]));
      }
    } else {
      uint16_t* out = static_cast<uint16_t*>(job.out) + at;
      uint32_t pairs[C / 2];
#pragma unroll
      for (int k = 0; k < C / 2; ++k) {
        pairs[k] = pack_pair(job.out_type, acc[2 * k], acc[2 * k + 1]);
      }
      if constexpr (C == 4) {
        store_streaming(out, pairs[0], pairs[1]);
      } else {
#pragma unroll
        for (int k = 0; k < C / 2; k += 4) {
          store_streaming(out + 2 * k, pairs[k], pairs[k + 1], pairs[k + 2], pairs[k + 3]);
        }
      }
    }
    clear();
  }
};

// Sums and writes columns [column, column + C) of the group's bags.
template <int64_t T, Mode M, bool Wide>
__device__ __forceinline__ void stream_bags(const CudaLookup& job, const FeaturePlan& plan,
                                            const volatile BagShape& shape, int feature,
                                            const Group& group, int column, uint8_t* ring) {
  constexpr int C = Share<T>::kColumns;
  constexpr int kBytes = Share<T>::kBytes;
  constexpr bool kRingScale = M == Mode::kRowScale || M == Mode::kGeneral;
  const int count = group.count;
  const uint8_t* const ids =
      static_cast<const uint8_t*>(job.indices) + group.begin * (Wide ? 8 : 4);
  // A lane past the last column reads the first columns and writes nothing.
  const uint8_t* data = job.weights + plan.data_offset + (column < plan.dim ? column : 0) / C * kBytes;
  const uint8_t* scales = job.weights + plan.scale_offset;
  const uint32_t rows = static_cast<uint32_t>(plan.rows);
  const uint32_t row_stride = static_cast<uint32_t>(plan.row_stride);
  const uint32_t scale_stride = static_cast<uint32_t>(plan.scale_stride);
  const int scale_shift = min(static_cast<int>(plan.scale_shift), 31);
  const bool quantized = M == Mode::kRowScale || shape.quantized != 0;
  const float2 table_scale =
      !kRingScale && quantized ? load_scale(plan, scales, 0) : make_float2(1.0f, 0.0f);
  const uint32_t slot = shared_address(ring) + threadIdx.x * 16;
  const uint8_t* const slot_pointer = ring + threadIdx.x * 16;
  const uint8_t* const scale_slots = ring + kRingBytes + threadIdx.x * 4;
  uint32_t skipped = 0;  // bit s: ring slot s holds an id that contributes nothing
  RawId<Wide> id[kStep];

  const auto load_ids = [&](int at) {
#pragma unroll
    for (int u = 0; u < kStep; ++u) {
      if (at + u < count) id[u].load(ids, at + u);
    }
  };
  const auto issue = [&](int at, int stage) {
#pragma unroll
    for (int u = 0; u < kStep; ++u) {
      if (at + u < count) {
        uint32_t row;
        if constexpr (M == Mode::kGeneral) {
          const bool counts = group.lane == 0 && column < C;
          const int32_t resolved = resolve(job, plan, feature, id[u].value(), counts);
          const uint32_t bit = 1u << (stage + u);
          skipped = resolved < 0 ? skipped | bit : skipped & ~bit;
          row = static_cast<uint32_t>(max(resolved, 0));
        } else {
          row = id[u].nearest_row(rows);
        }
        copy_async<kBytes>(slot + (stage + u) * kThreads * 16,
                           data + static_cast<uint64_t>(row) * row_stride);
        if (kRingScale && quantized) {
          copy_async<4>(shared_address(scale_slots + (stage + u) * kThreads * 4),
                        scales + static_cast<uint64_t>(row >> scale_shift) * scale_stride);
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  Sum<C> sum;
  sum.clear();
  int bag = 0;  // within the group
  int bag_end = group.ends[0];
  const auto finish_bag = [&] {
    float divisor = 1.0f;
    if (shape.mean) {
      const int at = feature * static_cast<int>(job.batch) + group.bag + bag;
      divisor = static_cast<float>(load_offset(job, at + 1) - load_offset(job, at));
    }
    const int64_t at = (group.bag + bag) * job.out_width + shape.out_column + column;
    if (shape.plain_half) {
      sum.write_half(job, at, shape.quantized != 0);
    } else {
      sum.write(job, at, shape.dim - column, shape.vector_stores != 0, shape.quantized != 0,
                divisor);
    }
    ++bag;
    bag_end = bag == 1 ? group.ends[1] : bag == 2 ? group.ends[2] : INT_MAX;
  };

  load_ids(0);
#pragma unroll
  for (int s = 0; s < kRing; s += kStep) {
    issue(s, s);
    load_ids(s + kStep);
  }
  // Row k of the group's ids is in ring slot k % kRing.
  const auto add_row = [&](int k) {
    const int place = k % kRing;
    if (M == Mode::kGeneral && (skipped >> place & 1) != 0) return;
    uint32_t words[kBytes / 4];
    const uint8_t* at = slot_pointer + place * kThreads * 16;
    if constexpr (kBytes == 16) {
      const uint4 four = *reinterpret_cast<const uint4*>(at);
      words[0] = four.x;
      words[1] = four.y;
      words[2] = four.z;
      words[3] = four.w;
    } else {
      const uint2 two = *reinterpret_cast<const uint2*>(at);
      words[0] = two.x;
      words[1] = two.y;
    }
    float2 pair = table_scale;
    if (kRingScale && quantized) {
      pair = half_pair(*reinterpret_cast<const uint32_t*>(scale_slots + place * kThreads * 4));
    }
    if constexpr (M == Mode::kGeneral) {
      const float weight =
          job.id_weights == nullptr ? 1.0f : __ldg(job.id_weights + group.begin + k);
      pair.x = __fmul_rn(weight, pair.x);
      pair.y = __fmul_rn(weight, pair.y);
    }
    sum.bias = __fadd_rn(sum.bias, pair.y);
    float values[C];
    decode_share<T>(words, values);
#pragma unroll
    for (int c = 0; c < C; ++c) sum.acc[c] = fmaf(pair.x, values[c], sum.acc[c]);
  };
  // One place writes bags: its code is long, and unrolled copies of it would crowd out the loop.
  for (int i = 0; i < count; i += kStep) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kRing / kStep - 1) : "memory");
    const int step_end = min(i + kStep, count);
    int k = i;
    while (true) {
      const int stop = min(bag_end, step_end);
      if (stop - k == kStep) {
#pragma unroll
        for (int u = 0; u < kStep; ++u) add_row(i + u);
        k = stop;
      } else {
#pragma unroll 1
        for (; k < stop; ++k) add_row(k);
      }
      if (k >= step_end) break;
      finish_bag();
    }
    issue(i + kRing, i % kRing);
    load_ids(i + kRing + kStep);
  }
  while (bag < group.bags) finish_bag();
}

// Any layout and alignment, a warp per bag, one column per thread: correct, not fast.
__device__ void stream_bags_slowly(const CudaLookup& job, const FeaturePlan& plan, int feature,
                                   int bags_per_block) {
  const int lane = threadIdx.x % 32;
  const uint8_t* scales = job.weights + plan.scale_offset;
  const bool quantized = plan.scale_type != kNoScale;
  const int64_t dim = min(plan.dim, job.out_width - plan.out_column);
  for (int64_t tile = blockIdx.x; tile * bags_per_block < job.batch; tile += gridDim.x) {
    for (int b = threadIdx.x / 32; b < bags_per_block; b += kThreads / 32) {
      const int64_t bag = tile * bags_per_block + b;
      if (bag >= job.batch) break;
      const int64_t begin = load_offset(job, feature * job.batch + bag);
      const int64_t end = max(load_offset(job, feature * job.batch + bag + 1), begin);
      for (int64_t column = lane; column < dim; column += 32) {
        float acc = 0.0f;
        float bias = 0.0f;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t id = load_integer(job.indices, i, job.wide_ids);
          const int32_t row = resolve(job, plan, feature, id, column == 0);
          if (row < 0) continue;
          float factor = job.id_weights == nullptr ? 1.0f : __ldg(job.id_weights + i);
          if (quantized) {
            const float2 pair = load_scale(plan, scales, static_cast<uint32_t>(row));
            bias = __fadd_rn(bias, __fmul_rn(factor, pair.y));
            factor = __fmul_rn(factor, pair.x);
          }
          const uint8_t* data = job.weights + plan.data_offset + row * plan.row_stride;
          acc = fmaf(factor, decode_column(plan.weight_type, data, column), acc);
        }
        if (quantized) acc += bias;
        if (plan.pooling == kMean && end - begin > 1) {
          acc = __fdiv_rn(acc, static_cast<float>(end - begin));
        }
        store_element(job.out_type, job.out, bag * job.out_width + plan.out_column + column, acc);
      }
    }
  }
}

// Whether every share of every row can be copied whole and stays inside the buffer.
template <int64_t T>
__device__ __forceinline__ bool rows_hold_shares(const CudaLookup& job, const FeaturePlan& plan,
                                                 Mode mode) {
  constexpr int kBytes = Share<T>::kBytes;
  const int64_t shares = (plan.dim + Share<T>::kColumns - 1) / Share<T>::kColumns;
  const int64_t last = plan.data_offset + (plan.rows - 1) * plan.row_stride + shares * kBytes;
  const bool ring_scale = plan.scale_type == kNoScale || mode == Mode::kOneScale ||
                          (plan.scale_type == kHalfScale && plan.scale_stride <= 0x7fffffff &&
                           (plan.scale_offset | plan.scale_stride) % 4 == 0);
  return (plan.data_offset | plan.row_stride) % kBytes == 0 && last <= job.weight_bytes &&
         plan.row_stride <= 0x7fffffff && ring_scale;
}

// All columns of the group's bags.
template <int64_t T, Mode M, bool Wide>
__device__ __forceinline__ void stream_columns(const CudaLookup& job, const FeaturePlan& plan,
                                               const volatile BagShape& shape, int feature,
                                               const Group& group, int lanes, uint8_t* ring) {
  constexpr int C = Share<T>::kColumns;
  const int dim = static_cast<int>(plan.dim);
  for (int column = group.lane * C; column - group.lane * C < dim; column += lanes * C) {
    stream_bags<T, M, Wide>(job, plan, shape, feature, group, column, ring);
  }
}

// Whether mode M is enough for a feature.
template <Mode M>
__device__ __forceinline__ bool mode_serves(const CudaLookup& job, const FeaturePlan& plan) {
  const bool plain = plan.id_rule == kIdIsRow && plan.out_of_range == kClamp &&
                     job.id_weights == nullptr && job.outside == nullptr;
  if (M == Mode::kRowScale) return plain && plan.scale_type == kHalfScale;
  return plain &&
         (plan.scale_type == kNoScale || ((plan.rows - 1) >> plan.scale_shift) == 0);
}

// The feature that this block works on.
__device__ __forceinline__ int feature_of_block(const CudaLookup& job) {
  const int64_t ordered = job.plan[blockIdx.y].launch_order;
  return static_cast<int>(min(max(ordered, int64_t{0}), job.features - 1));
}

// Fills the warp's BagShape; all its threads call it.
__device__ __forceinline__ void share_shape(const CudaLookup& job, const FeaturePlan& plan,
                                            int lanes,
                                            BagShape* shape) {
  if (threadIdx.x % 32 == 0) {
    const int64_t element = job.out_type == OutType::kFloat32 ? 4 : 2;
    const int64_t at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.out));
    shape->out_column = plan.out_column;
    shape->dim = static_cast<int>(min(plan.dim, job.out_width - plan.out_column));
    shape->mean = plan.pooling == kMean;
    shape->quantized = plan.scale_type != kNoScale;
    shape->vector_stores = (at | plan.out_column * element | job.out_width * element) % 16 == 0;
    shape->plain_half = job.out_type == OutType::kFloat16 && plan.pooling == kSum &&
                        shape->vector_stores && shape->dim % (lanes * 16) == 0;
  }
  __syncwarp();
}

// Threads of a group whose rows are `dim` wide.
template <int64_t T>
__device__ __forceinline__ int lanes_of(int64_t dim) {
  const int shares = static_cast<int>((dim + Share<T>::kColumns - 1) / Share<T>::kColumns);
  return shares >= 32 ? 32 : shares <= 1 ? 1 : 1 << (32 - __clz(shares - 1));
}

template <int64_t T>
__device__ __forceinline__ void pool_feature(const CudaLookup& job, const FeaturePlan& plan,
                                             const BagShape& shape, int feature,
                                             int bags_per_group, uint8_t* ring) {
  const int lanes = lanes_of<T>(plan.dim);
  const int bags_per_block = kThreads / lanes * bags_per_group;
  if (!rows_hold_shares<T>(job, plan, Mode::kGeneral)) {
    stream_bags_slowly(job, plan, feature, bags_per_block);
    return;
  }
  for (int64_t tile = blockIdx.x; tile * bags_per_block < job.batch; tile += gridDim.x) {
    Group group;
    if (!group.take(job, feature, tile, lanes, bags_per_group)) continue;
    if (job.wide_ids) {
      stream_columns<T, Mode::kGeneral, true>(job, plan, shape, feature, group, lanes, ring);
    } else {
      stream_columns<T, Mode::kGeneral, false>(job, plan, shape, feature, group, lanes, ring);
    }
  }
}

__device__ void copy_dense(const CudaLookup& job) {
  const int element = job.out_type == OutType::kFloat32 ? 4 : 2;
  for (int64_t b = blockIdx.x; b < job.batch; b += gridDim.x) {
    for (int64_t column = threadIdx.x; column < job.dense_width; column += kThreads) {
      const int64_t from = b * job.dense_stride + column;
      const int64_t to = b * job.out_width + column;
      if (element == 4) {
        static_cast<uint32_t*>(job.out)[to] = static_cast<const uint32_t*>(job.dense)[from];
      } else {
        static_cast<uint16_t*>(job.out)[to] = static_cast<const uint16_t*>(job.dense)[from];
      }
    }
  }
}

// All features have weight type T and mode M; one that has not (the caller's hint was wrong) is
// summed slowly.  job.lanes is the group for every feature, so that offsets are on their way before
// the plan has been read, and the launch order is taken for the plan's own until it has been read:
// three loads that would wait for each other travel together.
template <int64_t T, Mode M, bool Wide>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    lookup_alike_kernel(const __grid_constant__ CudaLookup job, int bags_per_group) {
  extern __shared__ __align__(16) uint8_t ring[];
  __shared__ BagShape shapes[kThreads / 32];
  BagShape& shape = shapes[threadIdx.x / 32];
  if (blockIdx.y == job.features) {
    copy_dense(job);
    return;
  }
  const int lanes = static_cast<int>(job.lanes);
  int feature = static_cast<int>(blockIdx.y);
  Group group;
  bool works = group.take(job, feature, blockIdx.x, lanes, bags_per_group);
  const int ordered = feature_of_block(job);
  if (ordered != feature) {
    feature = ordered;
    works = group.take(job, feature, blockIdx.x, lanes, bags_per_group);
  }
  const FeaturePlan& plan = job.plan[feature];
  share_shape(job, plan, lanes, &shape);
  if (plan.weight_type != T || !mode_serves<M>(job, plan) || !rows_hold_shares<T>(job, plan, M)) {
    stream_bags_slowly(job, plan, feature, kThreads / lanes * bags_per_group);
  } else if (works) {
    stream_columns<T, M, Wide>(job, plan, shape, feature, group, lanes, ring);
  }
}

// Any mixture of features.
__global__ void __launch_bounds__(kThreads, 2)
    lookup_mixed_kernel(const __grid_constant__ CudaLookup job, int bags_per_group) {
  extern __shared__ __align__(16) uint8_t ring[];
  __shared__ BagShape shapes[kThreads / 32];
  BagShape& shape = shapes[threadIdx.x / 32];
  if (blockIdx.y == job.features) {
    copy_dense(job);
    return;
  }
  const int feature = feature_of_block(job);
  const FeaturePlan& plan = job.plan[feature];
  share_shape(job, plan, 32, &shape);
  switch (plan.weight_type) {
    case kFloat32:
      return pool_feature<kFloat32>(job, plan, shape, feature, bags_per_group, ring);
    case kFloat16:
      return pool_feature<kFloat16>(job, plan, shape, feature, bags_per_group, ring);
    case kBFloat16:
      return pool_feature<kBFloat16>(job, plan, shape, feature, bags_per_group, ring);
    case kFloat8:
      return pool_feature<kFloat8>(job, plan, shape, feature, bags_per_group, ring);
    case kInt8:
      return pool_feature<kInt8>(job, plan, shape, feature, bags_per_group, ring);
    default:
      return pool_feature<kInt4>(job, plan, shape, feature, bags_per_group, ring);
  }
}

using Kernel = void (*)(CudaLookup, int);

template <int64_t T, Mode M>
Kernel alike_kernel(const CudaLookup& job) {
  return job.wide_ids ? lookup_alike_kernel<T, M, true> : lookup_alike_kernel<T, M, false>;
}

// The kernel for features that are all alike, or else the one for any mixture.
Kernel kernel_for(const CudaLookup& job) {
  if (job.id_weights != nullptr || job.outside != nullptr) return lookup_mixed_kernel;
  if (job.alike == Alike::kNo) return lookup_mixed_kernel;
  const bool one_scale = job.alike == Alike::kOneScale;
  if (job.weight_type == kFloat16 && one_scale) {
    return alike_kernel<kFloat16, Mode::kOneScale>(job);
  }
  if (job.weight_type == kInt8) {
    return one_scale ? alike_kernel<kInt8, Mode::kOneScale>(job)
                     : alike_kernel<kInt8, Mode::kRowScale>(job);
  }
  if (job.weight_type == kInt4 && !one_scale) return alike_kernel<kInt4, Mode::kRowScale>(job);
  return lookup_mixed_kernel;
}

// A warp per id, neighbouring columns by neighbouring threads.
__global__ void __launch_bounds__(kThreads)
    lookup_rows_kernel(const __grid_constant__ CudaLookup job) {
  const int feature = static_cast<int>(blockIdx.y);
  const FeaturePlan& plan = job.plan[feature];
  const int lane = threadIdx.x % 32;
  const uint8_t* scales = job.weights + plan.scale_offset;
  const int64_t begin = load_offset(job, feature * job.batch);
  const int64_t end = load_offset(job, (feature + 1) * job.batch);
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t i = begin + static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
       i < end; i += step) {
    const int64_t id = load_integer(job.indices, i, job.wide_ids);
    const int32_t row = resolve(job, plan, feature, id, lane == 0);
    float2 pair = make_float2(1.0f, 0.0f);
    if (row >= 0 && plan.scale_type != kNoScale) {
      pair = load_scale(plan, scales, static_cast<uint32_t>(row));
    }
    for (int64_t column = lane; column < min(plan.dim, job.out_width); column += 32) {
      float value = 0.0f;
      if (row >= 0) {
        const uint8_t* data = job.weights + plan.data_offset + row * plan.row_stride;
        value = __fmul_rn(pair.x, decode_column(plan.weight_type, data, column));
        if (plan.scale_type != kNoScale) value = __fadd_rn(value, pair.y);
      }
      store_element(job.out_type, job.out, i * job.out_width + column, value);
    }
  }
}

}  // namespace

cudaError_t launch_lookup(const CudaLookup& given, int multiprocessors, cudaStream_t stream) {
  CudaLookup job = given;
  // Room for every bag of the widest feature; narrower ones need fewer blocks and the rest of
  // theirs leave at once.
  int64_t lanes = 1;
  while (lanes < (job.lanes > 0 ? job.lanes : 32) && lanes < 32) lanes *= 2;
  // More bags a group keep its ring full when bags are short; fewer when there is little work.
  const int64_t bags = job.features * job.batch;
  const int64_t resident = static_cast<int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  int bags_per_group = job.ids <= 2 * bags ? kMaxBagsPerGroup : job.ids <= 12 * bags ? 2 : 1;
  while (bags_per_group > 1 && bags * lanes < 2 * resident * kThreads * bags_per_group) {
    bags_per_group /= 2;
  }
  const int64_t per_block = kThreads / lanes * bags_per_group;
  const dim3 grid(static_cast<unsigned>((job.batch + per_block - 1) / per_block),
                  static_cast<unsigned>(job.features + (job.dense != nullptr ? 1 : 0)));
  job.lanes = lanes;
  kernel_for(job)<<<grid, kThreads, kSharedBytes, stream>>>(job, bags_per_group);
  return cudaGetLastError();
}

cudaError_t launch_lookup_rows(const CudaLookup& job, int multiprocessors, cudaStream_t stream) {
  const int64_t blocks = (job.ids + 7) / 8;
  const int64_t enough = static_cast<int64_t>(multiprocessors) * 16;
  const dim3 grid(static_cast<unsigned>(blocks < enough ? blocks : enough),
                  static_cast<unsigned>(job.features));
  lookup_rows_kernel<<<grid, kThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace tessera
