// DLRM's dot interaction of bfloat16 vectors and its gradient, by the tensor cores (mma.sync, sm_80
// and later).
//
// A warp owns a sample, its up to 32 vectors being rows of a matrix X.  Forward are the tiles of
// X X' on and below the diagonal, backward G X with the symmetric matrix G of the pairs' gradients.
// Everything that is read from X goes straight into registers, 16 bytes a thread: which column of X
// is which index of an operand does not matter as long as both operands agree (forward, where
// columns are summed over) or the result is put back in the same way (backward, where they are
// the result's columns).
//
// A sample's pairs are an odd number of 2-byte numbers.  So a block of 8 samples keeps its part of
// `out` in shared memory; together these are whole groups of 16 bytes, contiguous and aligned.
#include <cuda_bf16.h>

#include "cuda_train.h"

namespace tessera {
namespace {

constexpr int kSamples = 8;  // of a block, one a warp
constexpr int kThreads = kSamples * 32;
constexpr int kSharedWithoutAsking = 48 * 1024;

using Number = __nv_bfloat16;

__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where vector `v` of a sample begins.
__device__ __forceinline__ const Number* vector_of(const CudaPairs& job, int64_t sample, int v) {
  return v == 0 ? static_cast<const Number*>(job.dense) + sample * job.dim
                : static_cast<const Number*>(job.sparse) + (sample * job.count + v - 1) * job.dim;
}

// 8 numbers of a vector from `column` on; zeros beyond the vectors and beyond their ends.
__device__ __forceinline__ uint4 load_columns(const CudaPairs& job, int64_t sample, int v,
                                              int column) {
  if (v > job.count || column >= job.dim) return make_uint4(0, 0, 0, 0);
  return __ldg(reinterpret_cast<const uint4*>(vector_of(job, sample, v) + column));
}

__device__ __forceinline__ uint32_t word_of(const uint4& words, int k) {
  return k == 0 ? words.x : k == 1 ? words.y : k == 2 ? words.z : words.w;
}

__device__ __forceinline__ int out_width(const CudaPairs& job) {
  return static_cast<int>(job.dim + job.count * (job.count + 1) / 2);
}

// The numbers of `out` that belong to this block.
__device__ __forceinline__ int block_numbers(const CudaPairs& job) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(kSamples);
  return static_cast<int>(min(job.batch - first, static_cast<int64_t>(kSamples))) * out_width(job);
}

__global__ void __launch_bounds__(kThreads, 2) pairs_kernel(const __grid_constant__ CudaPairs job) {
  extern __shared__ __align__(16) Number staged[];  // [kSamples][out_width]
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4;
  const int place = lane % 4;
  const int width = out_width(job);
  const int64_t first = blockIdx.x * static_cast<int64_t>(kSamples);
  const int64_t sample = first + threadIdx.x / 32;
  if (sample < job.batch) {
    Number* out = staged + static_cast<int>(threadIdx.x / 32) * width;
    float sums[2][4][4] = {};  // 16 rows, 8 columns
    for (int begin = 0; begin < job.dim; begin += 128) {
      uint4 rows[4][4];  // vectors 8 j + group, columns begin + 32 c + 8 place
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          rows[j][c] = load_columns(job, sample, 8 * j + group, begin + 32 * c + 8 * place);
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int column = begin + 32 * c + 8 * place;
        if (group == 0 && column < job.dim) {
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const uint32_t word = word_of(rows[0][c], k / 2);
            out[column + k] =
                __ushort_as_bfloat16(static_cast<unsigned short>(k % 2 == 0 ? word : word >> 16));
          }
        }
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const uint32_t left[4] = {
                word_of(rows[2 * m][c], half), word_of(rows[2 * m + 1][c], half),
                word_of(rows[2 * m][c], half + 1), word_of(rows[2 * m + 1][c], half + 1)};
#pragma unroll
            for (int j = 0; j < 2 * m + 2; ++j) {
              multiply(sums[m][j], left, word_of(rows[j][c], half), word_of(rows[j][c], half + 1));
            }
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < 2 * m + 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 16 * m + group + (e < 2 ? 0 : 8);
          const int column = 8 * j + 2 * place + e % 2;
          if (column < row && row <= job.count) {
            out[job.dim + row * (row - 1) / 2 + column] = __float2bfloat16_rn(sums[m][j][e]);
          }
        }
      }
    }
  }
  __syncthreads();
  Number* to = static_cast<Number*>(job.out) + first * width;
  const int numbers = block_numbers(job);
  for (int at = static_cast<int>(threadIdx.x) * 8; at < numbers; at += kThreads * 8) {
    if (at + 8 <= numbers) {
      *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(staged + at);
    } else {
      for (int k = at; k < numbers; ++k) to[k] = staged[k];
    }
  }
}

// Number `k` of 8 of two vectors, `low`'s in the lower half.
__device__ __forceinline__ uint32_t pair_up(const uint4& low, const uint4& high, int k) {
  return __byte_perm(word_of(low, k / 2), word_of(high, k / 2), k % 2 == 0 ? 0x5410 : 0x7632);
}

__global__ void __launch_bounds__(kThreads, 2)
    pairs_backward_kernel(const __grid_constant__ CudaPairs job) {
  extern __shared__ __align__(16) Number staged[];  // [kSamples][out_width]
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4;
  const int place = lane % 4;
  const int width = out_width(job);
  const int64_t first = blockIdx.x * static_cast<int64_t>(kSamples);
  const int64_t sample = first + threadIdx.x / 32;
  const Number* from = static_cast<const Number*>(job.out) + first * width;
  const int numbers = block_numbers(job);
  for (int at = static_cast<int>(threadIdx.x) * 8; at < numbers; at += kThreads * 8) {
    if (at + 8 <= numbers) {
      *reinterpret_cast<uint4*>(staged + at) = __ldg(reinterpret_cast<const uint4*>(from + at));
    } else {
      for (int k = at; k < numbers; ++k) staged[k] = from[k];
    }
  }
  __syncthreads();
  if (sample >= job.batch) return;
  const Number* grad = staged + static_cast<int>(threadIdx.x / 32) * width;
  const int last = static_cast<int>(job.count);
  const auto of_pair = [&](int i, int j) -> uint32_t {
    const int high = max(i, j);
    const int low = min(i, j);
    if (high == low || high > last) return 0;
    return __bfloat16_as_ushort(grad[job.dim + high * (high - 1) / 2 + low]);
  };
  uint32_t symmetric[2][2][4];  // rows 16 m on, columns 16 k on
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = 16 * m + group + r % 2 * 8;
        const int column = 16 * k + 2 * place + r / 2 * 8;
        symmetric[m][k][r] = of_pair(row, column) | of_pair(row, column + 1) << 16;
      }
    }
  }
  // Threads of neighbouring `place` store neighbouring groups of 8 columns.
  const int own = 8 * (group / 2 + group % 2 * 4);
  for (int begin = 0; begin < job.dim; begin += 64) {
    uint4 rows[2][4];  // vectors 16 k + 2 place + 0, 1, 8, 9
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int v = 16 * k + 2 * place + r % 2 + r / 2 * 8;
        rows[k][r] = load_columns(job, sample, v, begin + own);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float sums[8][4] = {};
#pragma unroll
      for (int q = 0; q < 8; ++q) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          multiply(sums[q], symmetric[m][k], pair_up(rows[k][0], rows[k][1], q),
                   pair_up(rows[k][2], rows[k][3], q));
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int v = 16 * m + group + e / 2 * 8;
        const int column = begin + 8 * (place + e % 2 * 4);
        if (v > last || column >= job.dim) continue;
        uint32_t packed[4];
#pragma unroll
        for (int q = 0; q < 8; q += 2) {
          float2 values = make_float2(sums[q][e], sums[q + 1][e]);
          if (v == 0) {  // the dense vector is also passed on as it is
            values.x += __bfloat162float(grad[column + q]);
            values.y += __bfloat162float(grad[column + q + 1]);
          }
          packed[q / 2] = __bfloat16_as_ushort(__float2bfloat16_rn(values.x)) |
                          static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(values.y)))
                              << 16;
        }
        Number* to =
            v == 0 ? static_cast<Number*>(job.dense_grad) + sample * job.dim
                   : static_cast<Number*>(job.sparse_grad) + (sample * job.count + v - 1) * job.dim;
        *reinterpret_cast<uint4*>(to + column) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }
}

template <class Kernel>
cudaError_t launch(Kernel kernel, const CudaPairs& job, cudaStream_t stream) {
  const int64_t width = job.dim + job.count * (job.count + 1) / 2;
  const int bytes = static_cast<int>(kSamples * width * static_cast<int64_t>(sizeof(Number)));
  if (bytes > kSharedWithoutAsking) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
  }
  const int64_t blocks = (job.batch + kSamples - 1) / kSamples;
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_pairs(const CudaPairs& job, cudaStream_t stream) {
  return launch(pairs_kernel, job, stream);
}

cudaError_t launch_pairs_backward(const CudaPairs& job, cudaStream_t stream) {
  return launch(pairs_backward_kernel, job, stream);
}

}  // namespace tessera
