// Pooled and unpooled lookups of many tables in one launch: the kernels for any mixture of
// features, which serve what those of cuda_express.h, cuda_few.h, cuda_quick.h, cuda_short.h,
// cuda_wide.h and cuda_widths.h do not.
//
// blockIdx.y picks a feature (in the plan's launch order), blockIdx.x a tile of its bags.  A row is
// read by a group of `lanes` neighbouring threads, 16 bytes each (8 of int4): 8 lanes for 128 int8
// columns.  A group owns `bags_per_group` neighbouring bags and streams over their ids, which lie
// side by side, so rows are in flight across the ends of bags, and a bag of one id takes the same
// path as any other.
#include "cuda_express.h"
#include "cuda_few.h"
#include "cuda_quick.h"
#include "cuda_short.h"
#include "cuda_slow.cuh"
#include "cuda_wide.h"
#include "cuda_widths.h"

namespace tessera {
namespace {

// Whether every share of every row can be copied whole and stays inside the buffer.
template <int64_t T>
__device__ __forceinline__ bool rows_hold_shares(const CudaLookup& job, const FeaturePlan& plan) {
  constexpr int kBytes = Share<T>::kBytes;
  const int64_t shares = (plan.dim + Share<T>::kColumns - 1) / Share<T>::kColumns;
  const int64_t last = plan.data_offset + (plan.rows - 1) * plan.row_stride + shares * kBytes;
  const bool ring_scale = plan.scale_type == kNoScale ||
                          (plan.scale_type == kScaleBook && plan.scale_offset % 4 == 0) ||
                          (plan.scale_type == kHalfScale && plan.scale_stride <= 0x7fffffff &&
                           (plan.scale_offset | plan.scale_stride) % 4 == 0);
  return (plan.data_offset | plan.row_stride) % kBytes == 0 && last <= job.weight_bytes &&
         plan.row_stride <= 0x7fffffff && ring_scale;
}

// All columns of the group's bags.
template <int64_t T, bool Wide>
__device__ __forceinline__ void stream_columns(const CudaLookup& job, const FeaturePlan& plan,
                                               const volatile BagShape& shape, int feature,
                                               const Group& group, int lanes, uint8_t* ring) {
  constexpr int C = Share<T>::kColumns;
  const int dim = static_cast<int>(plan.dim);
  for (int column = group.lane * C; column - group.lane * C < dim; column += lanes * C) {
    stream_bags<T, Wide>(job, plan, shape, feature, group, column, ring);
  }
}

// Threads of a group whose rows are `dim` wide.
template <int64_t T>
__device__ __forceinline__ int lanes_of(int64_t dim) {
  const int shares = static_cast<int>((dim + Share<T>::kColumns - 1) / Share<T>::kColumns);
  return shares >= 32 ? 32 : shares <= 1 ? 1 : 1 << (32 - __clz(shares - 1));
}

template <int64_t T>
__device__ __forceinline__ void pool_feature(const CudaLookup& job, const FeaturePlan& plan,
                                             const BagShape& shape, int feature, int bags_per_group,
                                             uint8_t* ring) {
  const int lanes = lanes_of<T>(plan.dim);
  const int bags_per_block = kThreads / lanes * bags_per_group;
  if (!rows_hold_shares<T>(job, plan)) {
    stream_bags_slowly(job, plan, feature, bags_per_block);
    return;
  }
  for (int64_t tile = blockIdx.x; tile * bags_per_block < job.batch; tile += gridDim.x) {
    Group group;
    if (!group.take(job, feature, tile, lanes, bags_per_group)) continue;
    if (job.wide_ids) {
      stream_columns<T, true>(job, plan, shape, feature, group, lanes, ring);
    } else {
      stream_columns<T, false>(job, plan, shape, feature, group, lanes, ring);
    }
  }
}

// A group may have more threads than a row of any type has shares, but for multiples of this.
constexpr int kMixedWholeColumns = 32 * 16;

// Any mixture of features.
__global__ void __launch_bounds__(kThreads, 2)
    lookup_mixed_kernel(const __grid_constant__ CudaLookup job, int bags_per_group) {
  extern __shared__ __align__(kRingAlignment) uint8_t ring[];
  __shared__ BagShape shapes[kThreads / 32];
  BagShape& shape = shapes[threadIdx.x / 32];
  if (blockIdx.y == job.features) {
    copy_dense(job);
    return;
  }
  const int feature = feature_of_block(job);
  const FeaturePlan& plan = job.plan[feature];
  share_shape(job, plan, kMixedWholeColumns, &shape);
#define TESSERA_POOL(type) \
  case type: return pool_feature<type>(job, plan, shape, feature, bags_per_group, ring);
  switch (static_cast<WeightType>(plan.weight_type)) { TESSERA_WEIGHT_TYPES(TESSERA_POOL) }
#undef TESSERA_POOL
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
    const bool quantized = has_bias(plan.scale_type);
    float2 pair = make_float2(1.0f, 0.0f);
    if (row >= 0 && quantized) {
      pair = load_scale(plan, scales, static_cast<uint32_t>(row));
    }
    for (int64_t column = lane; column < min(plan.dim, job.out_width); column += 32) {
      float value = 0.0f;
      if (row >= 0) {
        const uint8_t* data = job.weights + plan.data_offset + row * plan.row_stride;
        if (plan.weight_type == kBlockInt8) pair.x = block_scale(scales, data, column);
        value = __fmul_rn(pair.x, decode_column(plan.weight_type, data, column));
        if (quantized) value = __fadd_rn(value, pair.y);
      }
      store_element(job.out_type, job.out_scale, job.out, i * job.out_width + column, value);
    }
  }
}

}  // namespace

cudaError_t launch_lookup(const CudaLookup& given, int multiprocessors, cudaStream_t stream) {
  CudaLookup job = given;
  cudaError_t status;
  if (launch_quick(job, multiprocessors, stream, &status)) return status;
  if (launch_wide_rows(job, multiprocessors, stream, &status)) return status;
  if (launch_short_bags(job, multiprocessors, stream, &status)) return status;
  if (launch_small(job, multiprocessors, stream, &status)) return status;
  if (launch_few_bags(job, multiprocessors, stream, &status)) return status;
  if (launch_express(job, multiprocessors, stream, &status)) return status;
  if (launch_widths(job, multiprocessors, stream, &status)) return status;
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
  lookup_mixed_kernel<<<grid, kThreads, kSharedBytes, stream>>>(job, bags_per_group);
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
