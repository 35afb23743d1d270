// The gradient through a ReLU and its sum over the rows in one pass over the memory.
//
// A thread has 8 neighbouring columns of every n-th row of its block's part, and adds up in float32
// what it passes on.  A block's sums are added up in shared memory, the parts' by a second kernel,
// both in one order, so that equal inputs give equal bits.
#include <cuda_bf16.h>

#include <algorithm>

#include "cuda_train.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int kPack = 8;            // numbers of a thread
constexpr int kMostAcross = 32;     // threads of a block side by side
constexpr int64_t kBlocks = 1056;   // eight for each multiprocessor of an H100 or H200
constexpr int64_t kLeastRows = 64;  // of a part

__global__ void __launch_bounds__(kThreads)
    relu_grad_kernel(const __grid_constant__ CudaReluGrad job) {
  __shared__ float shared_sums[kThreads * kPack];
  const int64_t packs = job.columns / kPack;
  const int across = static_cast<int>(min(packs, static_cast<int64_t>(kMostAcross)));
  const int down = kThreads / across;
  const int x = static_cast<int>(threadIdx.x) % across;
  const int y = static_cast<int>(threadIdx.x) / across;
  const int64_t pack = blockIdx.x * static_cast<int64_t>(across) + x;
  const int64_t part = (job.rows + gridDim.y - 1) / gridDim.y;
  const int64_t begin = blockIdx.y * part;
  const int64_t end = min(begin + part, job.rows);
  float sums[kPack] = {};
  if (pack < packs && y < down) {
    const auto* grad = static_cast<const uint4*>(job.grad);
    const auto* output = static_cast<const uint4*>(job.output);
    auto* passed = static_cast<uint4*>(job.passed);
#pragma unroll 4
    for (int64_t row = begin + y; row < end; row += down) {
      const uint4 g = __ldg(grad + row * packs + pack);
      const uint4 o = __ldg(output + row * packs + pack);
      const uint32_t given[4] = {g.x, g.y, g.z, g.w};
      const uint32_t outputs[4] = {o.x, o.y, o.z, o.w};
      uint32_t kept[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        // A bfloat16 number is the upper half of the float32 of the same value.
        const float low = __uint_as_float(outputs[k] << 16);
        const float high = __uint_as_float(outputs[k] & 0xffff0000u);
        kept[k] = given[k] & ((low <= 0.0f ? 0u : 0xffffu) | (high <= 0.0f ? 0u : 0xffff0000u));
        sums[2 * k] += __uint_as_float(kept[k] << 16);
        sums[2 * k + 1] += __uint_as_float(kept[k] & 0xffff0000u);
      }
      passed[row * packs + pack] = make_uint4(kept[0], kept[1], kept[2], kept[3]);
    }
  }
#pragma unroll
  for (int k = 0; k < kPack; ++k) shared_sums[k * kThreads + threadIdx.x] = sums[k];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < across * kPack; i += kThreads) {
    const int column = i % across;
    const int64_t at = (blockIdx.x * static_cast<int64_t>(across) + column) * kPack + i / across;
    if (at >= job.columns) continue;
    float sum = 0.0f;
    for (int r = 0; r < down; ++r) sum += shared_sums[i / across * kThreads + r * across + column];
    job.partial[blockIdx.y * job.columns + at] = sum;
  }
}

// Adds up `parts` rows of `partial`, 32 columns a block.
__global__ void __launch_bounds__(1024)
    add_parts_kernel(const __grid_constant__ CudaReluGrad job, int64_t parts) {
  __shared__ float shared_sums[32][33];
  const int64_t column = blockIdx.x * int64_t{32} + threadIdx.x;
  float sum = 0.0f;
  if (column < job.columns) {
    for (int64_t part = threadIdx.y; part < parts; part += 32) {
      sum += job.partial[part * job.columns + column];
    }
  }
  shared_sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= job.columns) return;
  for (int r = 1; r < 32; ++r) sum += shared_sums[r][threadIdx.x];
  job.sums[column] = sum;
}

int64_t blocks_across(int64_t columns) {
  const int64_t packs = columns / kPack;
  const int64_t across = std::min(packs, static_cast<int64_t>(kMostAcross));
  return (packs + across - 1) / across;
}

}  // namespace

int64_t relu_grad_parts(int64_t rows, int64_t columns) {
  const int64_t wanted = std::max(kBlocks / blocks_across(columns), int64_t{1});
  return std::clamp((rows + kLeastRows - 1) / kLeastRows, int64_t{1}, wanted);
}

cudaError_t launch_relu_grad(const CudaReluGrad& job, cudaStream_t stream) {
  const int64_t parts = relu_grad_parts(job.rows, job.columns);
  const dim3 grid(static_cast<unsigned>(blocks_across(job.columns)), static_cast<unsigned>(parts));
  relu_grad_kernel<<<grid, kThreads, 0, stream>>>(job);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  const auto blocks = static_cast<unsigned>((job.columns + 31) / 32);
  add_parts_kernel<<<blocks, dim3(32, 32), 0, stream>>>(job, parts);
  return cudaGetLastError();
}

}  // namespace tessera
