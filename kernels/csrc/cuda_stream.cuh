// How a group of threads sums its bags: ids to rows, rows through the ring, sums to the output.
//
// Rows travel by cp.async into a ring in shared memory, kRing rows ahead of the sum.  Each thread
// reads back only the bytes that it copied, so there is no barrier.  The ring is what registers
// could not hold: 8 rows x 16 bytes x 512 threads keep 64 KB in flight on a multiprocessor (twice
// that in the kernels of cuda_express.cuh), where about 30 KB are needed to cover 4.2 TB/s times
// the latency of a random row.
//
// The sum is the CPU's, in its order: acc = fma(weight * scale, q, acc), bias apart.
#pragma once

#include <climits>

#include "cuda_decode.cuh"
#include "cuda_loads.cuh"
#include "cuda_lookup.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor =
    3;                    // that a call must fill before groups take several bags
constexpr int kStep = 4;  // ids issued together
constexpr int kRing = 8;  // rows in flight of a group
constexpr int kMaxBagsPerGroup = 4;
constexpr int kRingBytes = kRing * kThreads * 16;
// Where the ring begins in shared memory.  Rows that go past the first cache are written there 128
// bytes at a time, and where that is not on such a boundary it takes up to twice as long: what else
// a kernel keeps in shared memory, in front of the ring, must not move it.
constexpr int kRingAlignment = 128;
constexpr int kSharedBytes = kRingBytes + kRing * kThreads * 4;
static_assert(kSharedBytes <= 48 * 1024, "more would have to be asked for");

// How results may be stored.
enum class Stores : int {
  kSingle,  // element by element
  kQuads,   // four columns at a time: places and widths are multiples of that
  kWhole,   // 16 bytes at a time
};

// What writing a bag needs of the plan; in shared memory to keep it out of registers.
struct BagShape {
  int64_t out_column;
  int dim;
  int mean;
  int quantized;
  Stores stores;
  int plain_half;  // fp16, sum pooling, whole shares, Stores::kWhole: the short way out
};

// How a group works on its bags.
struct Group {
  int lane;       // 0 .. lanes - 1
  int bag;        // the first bag
  int bags;       // how many, >= 1
  int64_t begin;  // where the ids of the first bag begin
  int count;      // ids of all bags
  // Where the first three bags end, from `begin`; the last bag takes the rest, whatever its end.
  int ends[kMaxBagsPerGroup - 1];

  // False: there is no bag for this group.
  __device__ __forceinline__ bool take(const CudaLookup& job, int feature, int64_t tile, int lanes,
                                       int bags_per_group) {
    lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    const int groups = kThreads / lanes;
    bag =
        (static_cast<int>(tile) * groups + static_cast<int>(threadIdx.x) / lanes) * bags_per_group;
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

  // The short way: 16 bits, all C columns, aligned.
  template <OutType Type>
  __device__ __forceinline__ void write_half(const CudaLookup& job, int64_t at, bool quantized) {
    uint16_t* out = static_cast<uint16_t*>(job.out) + at;
    const float add = quantized ? bias : 0.0f;
    uint32_t pairs[C / 2];
#pragma unroll
    for (int k = 0; k < C / 2; ++k) {
      pairs[k] = pack_pair(Type, acc[2 * k] + add, acc[2 * k + 1] + add);
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

  // The first `columns` columns of 16 bits, their number and places multiples of four.
  __device__ __forceinline__ void write_half_quads(const CudaLookup& job, int64_t at, int columns,
                                                   bool quantized) {
    uint16_t* out = static_cast<uint16_t*>(job.out) + at;
    const float add = quantized ? bias : 0.0f;
#pragma unroll
    for (int k = 0; k < C; k += 4) {
      const uint32_t low = pack_pair(job.out_type, acc[k] + add, acc[k + 1] + add);
      const uint32_t high = pack_pair(job.out_type, acc[k + 2] + add, acc[k + 3] + add);
      if (k < columns) store_streaming(out + k, low, high);
    }
    clear();
  }

  // The same 16 bytes at a time where they are there and their place is a multiple of that.
  __device__ __forceinline__ void write_sixteens(const CudaLookup& job, int64_t at, int columns,
                                                 bool quantized) {
    if constexpr (C == 8) {
      uint16_t* const out = static_cast<uint16_t*>(job.out) + at;
      if (columns >= C && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
        const float add = quantized ? bias : 0.0f;
        uint32_t pairs[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          pairs[k] = pack_pair(job.out_type, acc[2 * k] + add, acc[2 * k + 1] + add);
        }
        store_streaming(out, pairs[0], pairs[1], pairs[2], pairs[3]);
        clear();
        return;
      }
    }
    write_half_quads(job, at, columns, quantized);
  }

  // e4m3: the first `columns` columns, their number and places multiples of four, up to 16 at once
  // where all C are there and places are multiples of that.
  __device__ __forceinline__ void write_bytes(const CudaLookup& job, int64_t at, int columns) {
    uint8_t* out = static_cast<uint8_t*>(job.out) + at;
    uint32_t words[C / 4];
#pragma unroll
    for (int k = 0; k < C / 4; ++k) {
      const float* four = acc + 4 * k;
      words[k] = narrow_fp8(four[0] * job.out_scale, four[1] * job.out_scale,
                            four[2] * job.out_scale, four[3] * job.out_scale);
    }
    constexpr int kTogether = C < 16 ? C : 16;
    if (C > 4 && columns >= C && reinterpret_cast<uintptr_t>(out) % kTogether == 0) {
      if constexpr (C >= 16) {
#pragma unroll
        for (int k = 0; k < C / 4; k += 4) {
          store_streaming(out + 4 * k, words[k], words[k + 1], words[k + 2], words[k + 3]);
        }
      }
      if constexpr (C == 8) store_streaming(out, words[0], words[1]);
    } else {
#pragma unroll
      for (int k = 0; k < C / 4; ++k) {
        if (4 * k < columns) store_streaming(out + 4 * k, words[k]);
      }
    }
  }

  // Bias and mean, before the results are stored.
  __device__ __forceinline__ void complete(bool quantized, float divisor) {
#pragma unroll
    for (int k = 0; k < C; ++k) {
      if (quantized) acc[k] += bias;
      if (divisor > 1.0f) acc[k] = __fdiv_rn(acc[k], divisor);
    }
  }

  // The first `columns` columns, their number and places multiples of four.  Results of 16 bits
  // leave 16 bytes at a time between an odd first and last quad: every store is a write of its own
  // to a sector, and those take longer than their bytes.
  __device__ __forceinline__ void write_quads(const CudaLookup& job, int64_t at, int columns,
                                              bool quantized, float divisor) {
    complete(quantized, divisor);
    if (job.out_type == OutType::kFloat32) {
#pragma unroll
      for (int k = 0; k < C; k += 4) {
        if (k < columns) {
          store_streaming(static_cast<float*>(job.out) + at + k, __float_as_uint(acc[k]),
                          __float_as_uint(acc[k + 1]), __float_as_uint(acc[k + 2]),
                          __float_as_uint(acc[k + 3]));
        }
      }
    } else if (job.out_type == OutType::kFloat8) {
      write_bytes(job, at, columns);
    } else {
      uint16_t* out = static_cast<uint16_t*>(job.out) + at;
      uint32_t pairs[C / 2];
#pragma unroll
      for (int k = 0; k < C / 2; ++k) {
        pairs[k] = pack_pair(job.out_type, acc[2 * k], acc[2 * k + 1]);
      }
      const bool odd = reinterpret_cast<uintptr_t>(out) % 16 != 0;
#pragma unroll
      for (int k = 0; k < C; k += 4) {
        const bool first = (k % 8 == 0) != odd;  // of a pair of quads
        const bool paired = k + 8 <= C && first && k + 8 <= columns;
        const bool stored = k > 0 && !first && k + 4 <= columns;  // with the quad before
        if (paired) {
          if constexpr (C > 4) {
            const int next = k + 4 < C ? k / 2 + 2 : 0;
            store_streaming(out + k, pairs[k / 2], pairs[k / 2 + 1], pairs[next], pairs[next + 1]);
          }
        } else if (!stored && k < columns) {
          store_streaming(out + k, pairs[k / 2], pairs[k / 2 + 1]);
        }
      }
    }
    clear();
  }

  // 16 bytes at a time where all C columns are there and places are multiples of that, else one by
  // one.
  __device__ __forceinline__ void write(const CudaLookup& job, int64_t at, int columns,
                                        bool vector_stores, bool quantized, float divisor) {
    complete(quantized, divisor);
    if (!vector_stores || columns < C) {
#pragma unroll
      for (int k = 0; k < C; ++k) {
        if (k < columns) store_element(job.out_type, job.out_scale, job.out, at + k, acc[k]);
      }
    } else if (job.out_type == OutType::kFloat32) {
      float* out = static_cast<float*>(job.out) + at;
#pragma unroll
      for (int k = 0; k < C; k += 4) {
        store_streaming(out + k, __float_as_uint(acc[k]), __float_as_uint(acc[k + 1]),
                        __float_as_uint(acc[k + 2]), __float_as_uint(acc[k + 3]));
      }
    } else if (job.out_type == OutType::kFloat8) {
      write_bytes(job, at, C);
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
template <int64_t T, bool Wide>
__device__ __forceinline__ void stream_bags(const CudaLookup& job, const FeaturePlan& plan,
                                            const volatile BagShape& shape, int feature,
                                            const Group& group, int column, uint8_t* ring) {
  constexpr int C = Share<T>::kColumns;
  constexpr int kBytes = Share<T>::kBytes;
  const int count = group.count;
  const uint8_t* const ids =
      static_cast<const uint8_t*>(job.indices) + group.begin * (Wide ? 8 : 4);
  // A lane past the last column reads the first columns and writes nothing.
  const uint8_t* data =
      job.weights + plan.data_offset + (column < plan.dim ? column : 0) / C * kBytes;
  const uint8_t* scales = job.weights + plan.scale_offset;
  const uint32_t row_stride = static_cast<uint32_t>(plan.row_stride);
  const uint32_t scale_stride = static_cast<uint32_t>(plan.scale_stride);
  const int scale_shift = min(static_cast<int>(plan.scale_shift), 31);
  const bool quantized = shape.quantized != 0;
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
        const bool counts = group.lane == 0 && column < C;
        const int32_t resolved = resolve(job, plan, feature, id[u].value(), counts);
        const uint32_t bit = 1u << (stage + u);
        skipped = resolved < 0 ? skipped | bit : skipped & ~bit;
        const uint32_t row = static_cast<uint32_t>(max(resolved, 0));
        copy_async<kBytes>(slot + (stage + u) * kThreads * 16,
                           data + static_cast<uint64_t>(row) * row_stride);
        if (quantized) {
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
      sum.template write_half<OutType::kFloat16>(job, at, shape.quantized != 0);
    } else {
      sum.write(job, at, shape.dim - column, shape.stores == Stores::kWhole, shape.quantized != 0,
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
    if ((skipped >> place & 1) != 0) return;
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
    float2 pair = make_float2(1.0f, 0.0f);
    if constexpr (T == kBlockInt8) {
      pair.x = __ldg(reinterpret_cast<const float*>(scales) + block_code(words[0]));
    } else if (quantized) {
      pair = half_pair(*reinterpret_cast<const uint32_t*>(scale_slots + place * kThreads * 4));
    }
    const float weight = job.id_weights == nullptr ? 1.0f : __ldg(job.id_weights + group.begin + k);
    pair.x = __fmul_rn(weight, pair.x);
    pair.y = __fmul_rn(weight, pair.y);
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

}  // namespace
}  // namespace tessera
