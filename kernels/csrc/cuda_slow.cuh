// What every lookup kernel falls back on or shares: a way to sum any feature, the launch order, and
// the copy of the dense vectors.
#pragma once

#include "cuda_stream.cuh"

namespace tessera {
namespace {

// Any layout and alignment, a warp per bag, one column per thread: correct, not fast.  The block
// sums `bags_per_block` bags for every `step`-th tile from `first_tile` on.
__device__ void stream_bags_slowly(const CudaLookup& job, const FeaturePlan& plan, int feature,
                                   int bags_per_block, int64_t first_tile, int64_t step) {
  const int lane = threadIdx.x % 32;
  const uint8_t* scales = job.weights + plan.scale_offset;
  const bool quantized = has_bias(plan.scale_type);
  const int64_t dim = min(plan.dim, job.out_width - plan.out_column);
  for (int64_t tile = first_tile; tile * bags_per_block < job.batch; tile += step) {
    for (int b = threadIdx.x / 32; b < bags_per_block; b += blockDim.x / 32) {
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
          if (plan.weight_type == kBlockInt8) {
            factor = __fmul_rn(factor, block_scale(scales, data, column));
          }
          acc = fmaf(factor, decode_column(plan.weight_type, data, column), acc);
        }
        if (quantized) acc += bias;
        if (plan.pooling == kMean && end - begin > 1) {
          acc = __fdiv_rn(acc, static_cast<float>(end - begin));
        }
        store_element(job.out_type, job.out_scale, job.out,
                      bag * job.out_width + plan.out_column + column, acc);
      }
    }
  }
}

// The same for the tiles of a grid whose x counts tiles.
__device__ __forceinline__ void stream_bags_slowly(const CudaLookup& job, const FeaturePlan& plan,
                                                   int feature, int bags_per_block) {
  stream_bags_slowly(job, plan, feature, bags_per_block, blockIdx.x, gridDim.x);
}

// a / b for numbers up to a thousand or so: the quotient's error is far below 1 / (2 b).
__device__ __forceinline__ int small_quotient(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// A number of a feature as the plan gives it, kept inside the plan.
__device__ __forceinline__ int clamp_feature(const CudaLookup& job, int64_t feature) {
  return static_cast<int>(min(max(feature, int64_t{0}), job.features - 1));
}

// The feature that is launched k-th.
__device__ __forceinline__ int ordered_feature(const CudaLookup& job, int64_t k) {
  return clamp_feature(job, job.plan[k].launch_order);
}

// The feature that this block works on.
__device__ __forceinline__ int feature_of_block(const CudaLookup& job) {
  return ordered_feature(job, blockIdx.y);
}

// How many of a warp's first `features` lanes come before this one, the highest keys first and then
// by number: a vote over each bit.  All threads of a warp call it.
template <int KeyBits>
__device__ __forceinline__ int rank_by_votes(uint32_t key, int features) {
  uint32_t higher = 0;
  uint32_t same = ~0u >> (32 - features);
#pragma unroll
  for (int bit = KeyBits - 1; bit >= 0; --bit) {
    const bool mine = (key >> bit & 1) != 0;
    const uint32_t ones = __ballot_sync(~0u, mine);
    if (!mine) higher |= same & ones;
    same &= mine ? ones : ~ones;
  }
  const uint32_t before = (1u << (threadIdx.x % 32)) - 1;
  return __popc(higher) + __popc(same & before);
}

// The feature that this block works on: those with the most ids in the call come first, so that
// their long bags do not end last.  Numbers of ids count as the same where they agree in their
// highest bit and the next: one warp compares those six bits of 32 features by six votes.  Where
// there are more features than a warp has lanes, the plan says.  All threads of a block call it.
__device__ __forceinline__ int longest_feature_of_block(const CudaLookup& job) {
  constexpr int kLanes = 32;
  constexpr int kKeyBits = 6;
  if (job.features > kLanes) return feature_of_block(job);
  __shared__ int found;
  if (threadIdx.x < kLanes) {
    const int features = static_cast<int>(job.features);
    const int lane = static_cast<int>(threadIdx.x);
    const int64_t begin =
        load_integer(job.offsets, min(lane, features) * job.batch, job.wide_offsets);
    int64_t end = __shfl_down_sync(~0u, begin, 1);
    if (lane == kLanes - 1 && features == kLanes) {
      end = load_integer(job.offsets, job.features * job.batch, job.wide_offsets);
    }
    // A float from 1 to 2^31: five bits of exponent and one of what follows.
    const float ids = static_cast<float>(min(max(end - begin, int64_t{1}), int64_t{0x7fffffff}));
    const uint32_t key = (__float_as_uint(ids) - __float_as_uint(1.0f)) >> 22;
    const int rank = rank_by_votes<kKeyBits>(key, features);
    if (lane < features && rank == static_cast<int>(blockIdx.y)) found = lane;
  }
  __syncthreads();
  return found;
}

// The same by widths: the features whose rows are the widest come first, in steps of eight columns.
// All threads of a warp call it.
__device__ __forceinline__ int widest_feature_of_block(const CudaLookup& job) {
  constexpr int kLanes = 32;
  constexpr int kKeyBits = 8;
  constexpr int64_t kMostKey = (1 << kKeyBits) - 1;
  if (job.features > kLanes) return static_cast<int>(blockIdx.y);
  const int features = static_cast<int>(job.features);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t dim = __ldg(&job.plan[min(lane, features - 1)].dim);
  const auto key = static_cast<uint32_t>(min(max(dim / 8, int64_t{0}), kMostKey));
  const int rank = rank_by_votes<kKeyBits>(key, features);
  const bool found = lane < features && rank == static_cast<int>(blockIdx.y);
  return __ffs(static_cast<int>(__ballot_sync(~0u, found))) - 1;
}

// Copies a feature's record into the warp's `to`; all its threads call it.  Reading it field by
// field where it lies would wait for one sector after the other.
__device__ __forceinline__ void fetch_plan(const CudaLookup& job, int feature, FeaturePlan* to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();  // nobody reads the record before
  if (lane < kPlanColumns) {
    reinterpret_cast<int64_t*>(to)[lane] =
        __ldg(reinterpret_cast<const int64_t*>(job.plan + feature) + lane);
  }
  __syncwarp();
}

// Fills the warp's BagShape; all its threads call it.  Every thread of a group has all its columns
// where the width is a multiple of `whole_columns`.
__device__ __forceinline__ void share_shape(const CudaLookup& job, const FeaturePlan& plan,
                                            int whole_columns, BagShape* shape) {
  if (threadIdx.x % 32 == 0) {
    const int64_t element = element_bytes(job.out_type);
    const int64_t at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.out)) |
                       plan.out_column * element | job.out_width * element;
    shape->out_column = plan.out_column;
    shape->dim = static_cast<int>(min(plan.dim, job.out_width - plan.out_column));
    shape->mean = plan.pooling == kMean;
    shape->quantized = has_bias(plan.scale_type);
    shape->stores = shape->dim % 4 != 0 || (at & (4 * element - 1)) != 0 ? Stores::kSingle
                    : at % 16 != 0 || element == 1                       ? Stores::kQuads
                                                                         : Stores::kWhole;
    shape->plain_half = job.out_type == OutType::kFloat16 && plan.pooling == kSum &&
                        shape->stores == Stores::kWhole && shape->dim % whole_columns == 0;
  }
  __syncwarp();
}

// The same in pieces of 16 bytes, several on their way.
__device__ __forceinline__ void copy_dense_in_sixteens(const CudaLookup& job, int64_t element) {
  constexpr int kTogether = 4;
  const int64_t in_row = job.dense_width * element / 16;
  const int64_t count = job.batch * in_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const auto* from = static_cast<const uint8_t*>(job.dense);
  auto* to = static_cast<uint8_t*>(job.out);
  for (int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; first < count;
       first += kTogether * step) {
    uint4 pieces[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t at = first + k * step;
      if (at >= count) break;
      const int64_t row = at / in_row;
      pieces[k] = __ldg(reinterpret_cast<const uint4*>(from + row * job.dense_stride * element) +
                        (at - row * in_row));
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t at = first + k * step;
      if (at >= count) break;
      const int64_t row = at / in_row;
      reinterpret_cast<uint4*>(to + row * job.out_width * element)[at - row * in_row] = pieces[k];
    }
  }
}

// The dense vectors to the first columns, by the blocks behind the last feature.
__device__ void copy_dense(const CudaLookup& job) {
  const int64_t element = element_bytes(job.out_type);
  const int64_t places = static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.dense)) |
                         static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.out));
  if ((places | job.dense_width * element | job.dense_stride * element | job.out_width * element) %
          16 ==
      0) {
    return copy_dense_in_sixteens(job, element);
  }
  for (int64_t b = blockIdx.x; b < job.batch; b += gridDim.x) {
    for (int64_t column = threadIdx.x; column < job.dense_width; column += blockDim.x) {
      const int64_t from = b * job.dense_stride + column;
      const int64_t to = b * job.out_width + column;
      if (element == 4) {
        static_cast<uint32_t*>(job.out)[to] = static_cast<const uint32_t*>(job.dense)[from];
      } else if (element == 2) {
        static_cast<uint16_t*>(job.out)[to] = static_cast<const uint16_t*>(job.dense)[from];
      } else {
        static_cast<uint8_t*>(job.out)[to] = static_cast<const uint8_t*>(job.dense)[from];
      }
    }
  }
}

}  // namespace
}  // namespace tessera
