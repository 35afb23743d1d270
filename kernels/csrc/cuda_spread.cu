// blockIdx.y picks a feature, a warp copies its columns of one sample, 16 bytes a thread where rows
// and columns allow it.  The few bags stay in the cache, so this runs at the speed of its stores.
#include "cuda_spread.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr int kWarps = 8;

template <class Unit>
__device__ __forceinline__ void copy_row(const uint8_t* from, uint8_t* to, int64_t bytes) {
  for (int64_t at = threadIdx.x % 32 * sizeof(Unit); at < bytes; at += 32 * sizeof(Unit)) {
    *reinterpret_cast<Unit*>(to + at) = __ldg(reinterpret_cast<const Unit*>(from + at));
  }
}

__global__ void __launch_bounds__(kWarps * 32)
    spread_kernel(const __grid_constant__ CudaSpread job) {
  const FeaturePlan& plan = job.plan[blockIdx.y];
  const int64_t column = plan.out_column;
  const int64_t bytes = min(plan.dim, job.width - column) * job.element_bytes;
  const int64_t stride = job.width * job.element_bytes;
  const auto pooled = reinterpret_cast<uintptr_t>(job.pooled);
  const auto out = reinterpret_cast<uintptr_t>(job.out);
  const int64_t offset = column * job.element_bytes;
  const bool whole =
      (pooled | out | static_cast<uintptr_t>(stride | offset | bytes)) % sizeof(uint4) == 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t b = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / 32; b < job.batch;
       b += step) {
    const int64_t asked = job.wide ? __ldg(static_cast<const int64_t*>(job.sample_rows) + b)
                                   : __ldg(static_cast<const int32_t*>(job.sample_rows) + b);
    const int64_t bag = min(max(asked, int64_t{0}), job.bags - 1);
    const uint8_t* from = reinterpret_cast<const uint8_t*>(pooled) + bag * stride + offset;
    uint8_t* to = reinterpret_cast<uint8_t*>(out) + b * stride + offset;
    if (whole) {
      copy_row<uint4>(from, to, bytes);
    } else if (job.element_bytes == 4) {
      copy_row<uint32_t>(from, to, bytes);
    } else {
      copy_row<uint16_t>(from, to, bytes);
    }
  }
}

}  // namespace

cudaError_t launch_spread(const CudaSpread& job, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 4096;
  const int64_t blocks = std::min((job.batch + kWarps - 1) / kWarps, kMostBlocks);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(job.features));
  spread_kernel<<<grid, kWarps * 32, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace tessera
