// Sums of lengths in at most two launches: what torch's own functions make of it are five.
//
// Every block has kPiece lengths.  Where there are several, a first kernel adds up each piece; a
// block of the second adds up the pieces before its own (a few hundred numbers at most in a call
// that fits a GPU), then its own lengths one after the other.
#include "cuda_offsets.h"

#include "cuda_loads.cuh"

namespace tessera {
namespace {

constexpr int kBlock = 512;
constexpr int kEach = 8;  // lengths of a thread, side by side
constexpr int kPiece = kBlock * kEach;
constexpr int kWarps = kBlock / 32;

__device__ __forceinline__ int64_t warp_sum(int64_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  return value;
}

// The sum of what all threads of the block give; `room` may be used again when it returns.
__device__ __forceinline__ int64_t block_sum(int64_t value, int64_t* room) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  int64_t total = 0;
  for (int warp = 0; warp < kWarps; ++warp) total += room[warp];
  __syncthreads();
  return total;
}

__global__ void __launch_bounds__(kBlock)
    sums_kernel(const void* lengths, bool wide, int64_t count, int64_t* sums) {
  __shared__ int64_t room[kWarps];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPiece;
  int64_t sum = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int64_t at = first + k * kBlock + threadIdx.x;
    if (at < count) sum += load_integer(lengths, at, wide);
  }
  sum = block_sum(sum, room);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kBlock)
    offsets_kernel(const void* lengths, bool wide, int64_t count, const int64_t* sums,
                   int64_t* offsets) {
  __shared__ int64_t room[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int64_t before = 0;
  for (int64_t piece = threadIdx.x; piece < blockIdx.x; piece += kBlock) before += sums[piece];
  if (blockIdx.x > 0) before = block_sum(before, room);
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kPiece + static_cast<int64_t>(threadIdx.x) * kEach;
  int64_t mine[kEach];
  int64_t sum = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    mine[k] = first + k < count ? load_integer(lengths, first + k, wide) : 0;
    sum += mine[k];
  }
  int64_t end = sum;  // of this thread and those before it in the warp
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t found = __shfl_up_sync(~0u, end, distance);
    if (lane >= distance) end += found;
  }
  if (lane == 31) room[threadIdx.x / 32] = end;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(threadIdx.x) / 32; ++warp) before += room[warp];
  before += end - sum;
  if (blockIdx.x == 0 && threadIdx.x == 0) offsets[0] = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    before += mine[k];
    if (first + k < count) offsets[first + k + 1] = before;
  }
}

}  // namespace

int64_t offset_sums(int64_t count) { return (count + kPiece - 1) / kPiece; }

cudaError_t launch_offsets(const void* lengths, bool wide_lengths, int64_t count, int64_t* sums,
                           int64_t* offsets, cudaStream_t stream) {
  const int64_t pieces = offset_sums(count);
  const auto blocks = static_cast<unsigned>(pieces > 1 ? pieces : 1);
  if (blocks > 1) sums_kernel<<<blocks, kBlock, 0, stream>>>(lengths, wide_lengths, count, sums);
  offsets_kernel<<<blocks, kBlock, 0, stream>>>(lengths, wide_lengths, count, sums, offsets);
  return cudaGetLastError();
}

}  // namespace tessera
