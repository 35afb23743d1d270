// Dense layers whose inputs or outputs are too few for tensor cores, on the ordinary units: what
// counts is that the wide side passes through memory once, in the type that its neighbour reads.
#include "cuda_thin.h"

#include <algorithm>

#include "cuda_decode.cuh"

namespace tessera {
namespace {

constexpr int kBlock = 256;
constexpr int kMostInputs = kThin - 1;
constexpr int kRowsTogether = 32;  // of a block of the kernel for few inputs

template <bool Narrow>
__device__ __forceinline__ float load_input(const CudaThin& job, int64_t row, int64_t column) {
  const int64_t at = row * job.input_stride + column;
  if constexpr (Narrow) return __bfloat162float(static_cast<const __nv_bfloat16*>(job.input)[at]);
  return static_cast<const float*>(job.input)[at];
}

__device__ __forceinline__ float finish(const CudaThin& job, float sum) {
  return job.relu && sum < 0.0f ? 0.0f : sum;  // NaN stays
}

// Few inputs: a thread has two neighbouring outputs, whose weights it keeps in registers, of the
// rows of its block, whose inputs lie in shared memory.
template <int Inputs, bool Narrow>
__global__ void __launch_bounds__(kBlock) few_inputs_kernel(const __grid_constant__ CudaThin job) {
  __shared__ float rows[kRowsTogether][kThin];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRowsTogether;
  const int count = static_cast<int>(min(job.rows - first, int64_t{kRowsTogether}));
  const int inputs = static_cast<int>(job.inputs);
  for (int k = static_cast<int>(threadIdx.x); k < count * kThin; k += kBlock) {
    const int column = k % kThin;
    rows[k / kThin][column] =
        column < inputs ? load_input<Narrow>(job, first + k / kThin, column) : 0.0f;
  }
  __syncthreads();
  const int64_t output = (blockIdx.y * static_cast<int64_t>(kBlock) + threadIdx.x) * 2;
  if (output >= job.outputs) return;
  const bool both = output + 1 < job.outputs;
  float weights[2][Inputs];
  float bias[2] = {__ldg(job.bias + output), both ? __ldg(job.bias + output + 1) : 0.0f};
#pragma unroll
  for (int k = 0; k < Inputs; ++k) {
    const bool is_there = k < inputs;
    weights[0][k] = is_there ? __ldg(job.weight + output * inputs + k) : 0.0f;
    weights[1][k] = is_there && both ? __ldg(job.weight + (output + 1) * inputs + k) : 0.0f;
  }
  const bool paired = job.outputs % 2 == 0;  // a pair is stored at once
  for (int row = 0; row < count; ++row) {
    float sums[2] = {bias[0], bias[1]};
#pragma unroll
    for (int k = 0; k < Inputs; ++k) {
      sums[0] = fmaf(rows[row][k], weights[0][k], sums[0]);
      sums[1] = fmaf(rows[row][k], weights[1][k], sums[1]);
    }
    const float low = finish(job, sums[0]);
    const float high = finish(job, sums[1]);
    const int64_t at = (first + row) * job.outputs + output;
    if (paired && job.out_type == OutType::kBFloat16) {
      static_cast<uint32_t*>(job.out)[at / 2] = pack_pair(OutType::kBFloat16, low, high);
    } else if (paired && job.out_type == OutType::kFloat8) {
      static_cast<uint16_t*>(job.out)[at / 2] =
          static_cast<uint16_t>(narrow_fp8(low * job.scale, high * job.scale));
    } else {
      store_element(job.out_type, job.scale, job.out, at, low);
      if (both) store_element(job.out_type, job.scale, job.out, at + 1, high);
    }
  }
}

// Few outputs, at most Outputs: a warp per row, pairs of inputs by neighbouring lanes.
template <int Outputs, bool Narrow>
__global__ void __launch_bounds__(kBlock) few_outputs_kernel(const __grid_constant__ CudaThin job) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kBlock / 32);
  const int outputs = static_cast<int>(job.outputs);
  for (int64_t row = blockIdx.x * static_cast<int64_t>(kBlock / 32) + threadIdx.x / 32;
       row < job.rows; row += step) {
    float sums[Outputs] = {};
#pragma unroll 4
    for (int64_t column = lane * 2; column < job.inputs; column += 64) {
      const bool both = column + 1 < job.inputs;
      const float first = load_input<Narrow>(job, row, column);
      const float second = both ? load_input<Narrow>(job, row, column + 1) : 0.0f;
#pragma unroll
      for (int k = 0; k < Outputs; ++k) {
        if (Outputs > 1 && k >= outputs) break;
        const float* const weights = job.weight + k * job.inputs + column;
        sums[k] = fmaf(first, __ldg(weights), sums[k]);
        sums[k] = both ? fmaf(second, __ldg(weights + 1), sums[k]) : sums[k];
      }
    }
#pragma unroll
    for (int k = 0; k < Outputs; ++k) {
      if (Outputs > 1 && k >= outputs) break;
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        sums[k] += __shfl_xor_sync(~0u, sums[k], distance);
      }
      if (lane == 0) {
        store_element(job.out_type, job.scale, job.out, row * job.outputs + k,
                      finish(job, sums[k] + __ldg(job.bias + k)));
      }
    }
  }
}

template <bool Narrow>
void launch_few_inputs(const CudaThin& job, cudaStream_t stream) {
  constexpr int64_t kOutputsTogether = 2 * kBlock;
  const dim3 grid(static_cast<unsigned>((job.rows + kRowsTogether - 1) / kRowsTogether),
                  static_cast<unsigned>((job.outputs + kOutputsTogether - 1) / kOutputsTogether));
  if (job.inputs <= 4) {
    few_inputs_kernel<4, Narrow><<<grid, kBlock, 0, stream>>>(job);
  } else if (job.inputs <= 8) {
    few_inputs_kernel<8, Narrow><<<grid, kBlock, 0, stream>>>(job);
  } else {
    few_inputs_kernel<kThin, Narrow><<<grid, kBlock, 0, stream>>>(job);
  }
}

template <bool Narrow>
void launch_few_outputs(const CudaThin& job, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 1 << 14;
  const int64_t blocks = (job.rows + kBlock / 32 - 1) / (kBlock / 32);
  const auto grid = static_cast<unsigned>(std::min(blocks, kMostBlocks));
  if (job.outputs == 1) {
    few_outputs_kernel<1, Narrow><<<grid, kBlock, 0, stream>>>(job);
  } else if (job.outputs <= 4) {
    few_outputs_kernel<4, Narrow><<<grid, kBlock, 0, stream>>>(job);
  } else {
    few_outputs_kernel<kThin - 1, Narrow><<<grid, kBlock, 0, stream>>>(job);
  }
}

}  // namespace

cudaError_t launch_thin(const CudaThin& job, cudaStream_t stream) {
  if (job.inputs <= kMostInputs && job.outputs > job.inputs) {
    job.narrow_input ? launch_few_inputs<true>(job, stream) : launch_few_inputs<false>(job, stream);
  } else {
    job.narrow_input ? launch_few_outputs<true>(job, stream)
                     : launch_few_outputs<false>(job, stream);
  }
  return cudaGetLastError();
}

}  // namespace tessera
