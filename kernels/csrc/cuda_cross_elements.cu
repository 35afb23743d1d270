// What follows a cross layer's product where that was computed before: `x0 * y + x`.
#include <algorithm>

#include "cuda_cross.cuh"
#include "cuda_cross.h"

namespace tessera {
namespace {

__global__ void elements_kernel(const __grid_constant__ CudaCross job) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t count = job.rows * job.width;
  const auto* x0 = static_cast<const __nv_bfloat16*>(job.x0);
  const auto* x = static_cast<const __nv_bfloat16*>(job.x);
  const auto* y = static_cast<const __nv_bfloat16*>(job.v);
  auto* out = static_cast<__nv_bfloat16*>(job.out);
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    const int64_t row = i / job.width;
    const int64_t column = i % job.width;
    out[i] = __float2bfloat16_rn(fmaf(__bfloat162float(x0[row * job.x0_stride + column]),
                                      __bfloat162float(y[row * job.v_stride + column]),
                                      __bfloat162float(x[row * job.x_stride + column])));
  }
}

// The same, eight elements at a time.
__global__ void eights_kernel(const __grid_constant__ CudaCross job) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t in_row = job.width / 8;
  const int64_t count = job.rows * in_row;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    const int64_t row = i / in_row;
    const int64_t column = i % in_row * 8;
    const auto eight = [&](const void* from, int64_t stride) {
      const auto* at = static_cast<const uint16_t*>(from) + row * stride + column;
      return __ldg(reinterpret_cast<const uint4*>(at));
    };
    const uint4 x0 = eight(job.x0, job.x0_stride);
    const uint4 x = eight(job.x, job.x_stride);
    const uint4 y = eight(job.v, job.v_stride);
    const auto pair = [](uint32_t a, uint32_t b, uint32_t c) {
      const float2 product = widen(c);
      return crossed(a, b, product.x, product.y);
    };
    uint4 result;
    result.x = pair(x0.x, x.x, y.x);
    result.y = pair(x0.y, x.y, y.y);
    result.z = pair(x0.z, x.z, y.z);
    result.w = pair(x0.w, x.w, y.w);
    auto* to = static_cast<uint16_t*>(job.out) + row * job.width + column;
    *reinterpret_cast<uint4*>(to) = result;
  }
}

}  // namespace

cudaError_t launch_cross_elements(const CudaCross& job, cudaStream_t stream) {
  constexpr int kBlock = 256;
  constexpr int64_t kMostBlocks = 1 << 20;
  const bool eights = job.width % 8 == 0 && in_sixteens(job.x0, job.x0_stride) &&
                      in_sixteens(job.x, job.x_stride) && in_sixteens(job.v, job.v_stride) &&
                      in_sixteens(job.out, job.width);
  const int64_t items = job.rows * job.width / (eights ? 8 : 1);
  const auto blocks = static_cast<unsigned>(std::min((items + kBlock - 1) / kBlock, kMostBlocks));
  if (eights) {
    eights_kernel<<<blocks, kBlock, 0, stream>>>(job);
  } else {
    elements_kernel<<<blocks, kBlock, 0, stream>>>(job);
  }
  return cudaGetLastError();
}

}  // namespace tessera
