// What stands behind a product of e4m3 numbers where no kernel has it built in.
#include "cuda_layers_fp8.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "float8.cuh"

namespace tessera {
namespace {

constexpr int kBlock = 256;
constexpr int64_t kMostBlocks = 1 << 20;

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(
      std::clamp((threads + kBlock - 1) / kBlock, int64_t{1}, kMostBlocks));
}

__global__ void elements_kernel(const __grid_constant__ CudaCrossFp8 job) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t count = job.rows * job.width;
  const float scale = __ldg(job.scales[1]);
  const auto* y = reinterpret_cast<const __nv_bfloat16*>(job.v);
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    const int64_t row = i / job.width;
    const int64_t column = i % job.width;
    const float factor = widen_fp8(job.x0[row * job.x0_stride + column]).x;
    const float added = widen_fp8(job.x[row * job.x_stride + column]).x;
    const float layer = __bfloat162float(y[row * job.v_stride + column]);
    job.out[i] = static_cast<uint8_t>(narrow_fp8(fmaf(factor, layer, scale * added), 0.0f));
  }
}

// A negative number has the highest bit of its byte set.
__device__ __forceinline__ uint32_t without_negative(uint32_t four) {
  const uint32_t negative = (four & 0x80808080u) >> 7;
  return four & ~(negative * 0xffu);
}

__global__ void relu_kernel(uint8_t* numbers, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  auto* sixteens = reinterpret_cast<uint4*>(numbers);
  for (int64_t i = first; i < count / 16; i += step) {
    uint4 given = sixteens[i];
    given.x = without_negative(given.x);
    given.y = without_negative(given.y);
    given.z = without_negative(given.z);
    given.w = without_negative(given.w);
    sixteens[i] = given;
  }
  if (first < count % 16) {
    uint8_t& last = numbers[count / 16 * 16 + first];
    last = static_cast<uint8_t>(without_negative(last));
  }
}

}  // namespace

cudaError_t launch_cross_fp8_elements(const CudaCrossFp8& job, cudaStream_t stream) {
  elements_kernel<<<blocks_for(job.rows * job.width), kBlock, 0, stream>>>(job);
  return cudaGetLastError();
}

cudaError_t launch_relu_fp8(uint8_t* numbers, int64_t count, cudaStream_t stream) {
  relu_kernel<<<blocks_for(count / 16), kBlock, 0, stream>>>(numbers, count);
  return cudaGetLastError();
}

}  // namespace tessera
