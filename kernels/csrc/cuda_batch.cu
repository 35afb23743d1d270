// A batch of training on its way to the lookups, in one kernel for what takes torch's own functions
// some thirty launches: a step of a few milliseconds waits for the CPU that launches them.
#include "cuda_batch.h"
#include "cuda_loads.cuh"
#include "cuda_offsets.h"
#include "dense_step.h"
#include "ids.h"

namespace tessera {
namespace {

constexpr int kBlock = 256;
constexpr int kEach = 8;  // ids of a thread, so that it seldom changes the feature

// Where the bags of feature f begin.
__device__ __forceinline__ int64_t begin_of(const CudaIdRows& job, int64_t feature) {
  return load_integer(job.offsets, feature * job.batch, job.wide_offsets);
}

__global__ void __launch_bounds__(kBlock) id_rows_kernel(const __grid_constant__ CudaIdRows job) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * (kBlock * kEach) + threadIdx.x;
  if (i >= job.count) return;
  // The last feature that begins at or before i: those behind it without bags begin later.
  int64_t feature = 0;
  for (int64_t behind = job.features; behind - feature > 1;) {
    const int64_t middle = feature + (behind - feature) / 2;
    (begin_of(job, middle) <= i ? feature : behind) = middle;
  }
  int64_t end = 0;
  int64_t rows = 0;
  int64_t rule = 0;
  int64_t outside = 0;
  uint64_t reciprocal = 0;
  for (int k = 0; k < kEach && i < job.count; ++k, i += kBlock) {
    if (k == 0 || i >= end) {
      if (k > 0) {
        while (feature + 1 < job.features && begin_of(job, feature + 1) <= i) ++feature;
      }
      end = feature + 1 < job.features ? begin_of(job, feature + 1) : job.count;
      rows = __ldg(job.rows + feature);
      rule = __ldg(job.rules + feature);
      outside = __ldg(job.outside + feature);
      reciprocal = ~uint64_t{0} / static_cast<uint64_t>(rows);
    }
    bool no_row = false;
    job.out[i] = resolve_id(load_integer(job.ids, i, job.wide_ids), rows, rule, outside, reciprocal,
                            &no_row);
  }
}

// A thread has a row; those of a warp write next to each other.
__global__ void __launch_bounds__(kBlock)
    lengths_kernel(const __grid_constant__ CudaPackedRows job) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (row >= job.batch) return;
  const uint32_t present = __ldg(job.words + row * job.width + job.present);
  for (int64_t f = 0; f < job.features; ++f) {
    job.lengths[f * job.batch + row] = static_cast<int32_t>(present >> f & 1);
  }
}

// A block has 32 rows, which its warps read one after the other, a lane a feature, and write
// feature by feature, a lane a row.
constexpr int kTile = 32;

__global__ void __launch_bounds__(kBlock)
    values_kernel(const __grid_constant__ CudaPackedRows job) {
  __shared__ uint32_t ids[kTile][kTile + 1];
  __shared__ uint32_t present[kTile];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kTile;
  for (int r = warp; r < kTile; r += kBlock / 32) {
    if (tile + r >= job.batch) continue;
    const uint32_t* const row = job.words + (tile + r) * job.width;
    if (lane < job.features) ids[r][lane] = __ldg(row + job.first + lane);
    if (lane == 0) present[r] = __ldg(row + job.present);
  }
  __syncthreads();
  if (tile + lane >= job.batch) return;
  for (int f = warp; f < job.features; f += kBlock / 32) {
    if ((present[lane] >> f & 1) == 0) continue;
    const int64_t place = __ldg(job.offsets + f * job.batch + tile + lane);
    if (place < job.count) job.values[place] = ids[lane][f];
  }
}

__global__ void __launch_bounds__(kBlock)
    dense_steps_kernel(const __grid_constant__ CudaDenseSteps job) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= job.rows * job.columns) return;
  const int64_t row = i / job.columns;
  const int64_t column = i % job.columns;
  float value = __ldg(job.values + row * job.row_stride + column);
  for (int64_t k = 0; k < job.count; ++k) {
    const double* const step = job.steps + (k * job.columns + column) * 3;
    const auto kind = static_cast<DenseStep>(static_cast<int64_t>(__ldg(step)));
    value = apply_dense_step(kind, value, __ldg(step + 1), __ldg(step + 2));
  }
  job.out[i] = value;
}

unsigned blocks_of(int64_t count, int64_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

}  // namespace

cudaError_t launch_id_rows(const CudaIdRows& job, cudaStream_t stream) {
  id_rows_kernel<<<blocks_of(job.count, kBlock * kEach), kBlock, 0, stream>>>(job);
  return cudaGetLastError();
}

cudaError_t launch_dense_steps(const CudaDenseSteps& job, cudaStream_t stream) {
  dense_steps_kernel<<<blocks_of(job.rows * job.columns, kBlock), kBlock, 0, stream>>>(job);
  return cudaGetLastError();
}

cudaError_t launch_packed_rows(const CudaPackedRows& job, cudaStream_t stream) {
  lengths_kernel<<<blocks_of(job.batch, kBlock), kBlock, 0, stream>>>(job);
  cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  status =
      launch_offsets(job.lengths, false, job.features * job.batch, job.sums, job.offsets, stream);
  if (status != cudaSuccess) return status;
  values_kernel<<<blocks_of(job.batch, kTile), kBlock, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace tessera
