// DLRM's dot interaction, alone and behind a lookup.
//
// A warp owns a sample.  Its count + 1 vectors lie in shared memory; a thread computes tiles of 4 x
// 4 dot products, 64 multiply-adds per 8 loads of 16 bytes.  27 vectors make 28 tiles, so a warp is
// nearly full.  A tile's rows are n / 4 apart and rows are padded by 16 bytes: what the threads of
// a warp load together are neighbouring rows, and eight of those lie in different banks.
#include "cuda_interaction.h"

#include "cuda_express.cuh"

namespace tessera {
namespace {

constexpr int kTile = 4;
constexpr int kPad = 4;                 // floats
constexpr int kMostWarps = 4;           // samples of a block
constexpr int kMostShared = 96 * 1024;  // bytes of a block, so that two share a multiprocessor
constexpr int kSharedWithoutAsking = 48 * 1024;

// Rows of `stride` floats; a multiple of 4, so that each begins aligned.
__host__ __device__ __forceinline__ int row_floats(int64_t dim) {
  return static_cast<int>((dim + 3) / 4 * 4) + kPad;
}

// Where pair (i, j), j < i, of n vectors stands among the pairs.
__device__ __forceinline__ int pair_index(int i, int j, int n, bool upper) {
  if (!upper) return i * (i - 1) / 2 + j;
  return j * (2 * n - j - 1) / 2 + (i - j - 1);
}

// The pairs of one sample, by the threads of a warp.  vectors[n][stride]: columns past `dim` are 0.
__device__ __forceinline__ void multiply_pairs(const float* vectors, int stride, int n, int columns,
                                               bool upper, float* pairs) {
  const int tile_rows = (n + kTile - 1) / kTile;
  const int tiles = tile_rows * (tile_rows + 1) / 2;
  for (int tile = static_cast<int>(threadIdx.x) % 32; tile < tiles; tile += 32) {
    // The row of tiles: the largest r with r (r + 1) / 2 <= tile.
    int row = static_cast<int>((sqrtf(8.0f * static_cast<float>(tile) + 1.0f) - 1.0f) * 0.5f);
    while (row * (row + 1) / 2 > tile) --row;
    while ((row + 1) * (row + 2) / 2 <= tile) ++row;
    // Rows first + k * tile_rows by rows second + k * tile_rows: every pair is in one tile, and in
    // those with first == second twice.
    const int first = row;
    const int second = tile - row * (row + 1) / 2;
    const float* left[kTile];
    const float* right[kTile];
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      left[k] = vectors + min(first + k * tile_rows, n - 1) * stride;
      right[k] = vectors + min(second + k * tile_rows, n - 1) * stride;
    }
    float sums[kTile][kTile] = {};
#pragma unroll 2
    for (int column = 0; column < columns; column += 4) {
      float4 r[kTile];
#pragma unroll
      for (int j = 0; j < kTile; ++j) r[j] = *reinterpret_cast<const float4*>(right[j] + column);
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        const float4 l = *reinterpret_cast<const float4*>(left[i] + column);
#pragma unroll
        for (int j = 0; j < kTile; ++j) {
          float sum = fmaf(l.x, r[j].x, sums[i][j]);
          sum = fmaf(l.y, r[j].y, sum);
          sum = fmaf(l.z, r[j].z, sum);
          sums[i][j] = fmaf(l.w, r[j].w, sum);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        const int p = first + i * tile_rows;
        const int q = second + j * tile_rows;
        const bool twice = first == second && q > p;
        if (p < n && q < n && p != q && !twice) {
          pairs[pair_index(max(p, q), min(p, q), n, upper)] = sums[i][j];
        }
      }
    }
  }
}

// Copies the dense vector to row 0 and to the output; a warp calls it.
__device__ __forceinline__ void take_dense(const CudaInteraction& job, int64_t sample,
                                           float* vectors, float* out) {
  const float* from = job.dense + sample * job.dense_stride;
  for (int64_t column = threadIdx.x % 32; column < job.dim; column += 32) {
    const float value = __ldg(from + column);
    vectors[column] = value;
    out[column] = value;
  }
}

// Columns between dim and the next multiple of 4 of all rows.
__device__ __forceinline__ void clear_tails(const CudaInteraction& job, float* vectors,
                                            int stride) {
  const int tail = (4 - static_cast<int>(job.dim % 4)) % 4;
  const int n = static_cast<int>(job.count) + 1;
  for (int k = static_cast<int>(threadIdx.x) % 32; k < n * tail; k += 32) {
    vectors[k / tail * stride + job.dim + k % tail] = 0.0f;
  }
}

__global__ void __launch_bounds__(kMostWarps * 32)
    interaction_kernel(const __grid_constant__ CudaInteraction job) {
  extern __shared__ __align__(16) float shared_vectors[];
  const int stride = row_floats(job.dim);
  const int n = static_cast<int>(job.count) + 1;
  const int64_t sample = blockIdx.x * static_cast<int64_t>(blockDim.x / 32) + threadIdx.x / 32;
  if (sample >= job.batch) return;
  float* vectors = shared_vectors + static_cast<int64_t>(threadIdx.x / 32) * n * stride;
  float* out = job.out + sample * (job.dim + static_cast<int64_t>(n) * job.count / 2);
  take_dense(job, sample, vectors, out);
  const float* sparse = job.sparse + sample * job.sparse_stride;
  for (int v = 0; v < n - 1; ++v) {
    for (int64_t column = threadIdx.x % 32; column < job.dim; column += 32) {
      vectors[(v + 1) * stride + column] = __ldg(sparse + v * job.dim + column);
    }
  }
  clear_tails(job, vectors, stride);
  __syncwarp();
  multiply_pairs(vectors, stride, n, static_cast<int>(job.dim), job.upper, out + job.dim);
}

// Any number and width of vectors: a thread per pair, straight from memory.
__global__ void interaction_slow_kernel(const __grid_constant__ CudaInteraction job) {
  const int n = static_cast<int>(job.count) + 1;
  const float* dense = job.dense + blockIdx.x * job.dense_stride;
  const float* sparse = job.sparse + blockIdx.x * job.sparse_stride;
  float* out = job.out + blockIdx.x * (job.dim + static_cast<int64_t>(n) * job.count / 2);
  for (int64_t column = threadIdx.x; column < job.dim; column += blockDim.x) {
    out[column] = __ldg(dense + column);
  }
  for (int64_t pair = threadIdx.x; pair < static_cast<int64_t>(n) * n; pair += blockDim.x) {
    const int i = static_cast<int>(pair / n);
    const int j = static_cast<int>(pair % n);
    if (j >= i) continue;
    const float* left = sparse + (i - 1) * job.dim;
    const float* right = j == 0 ? dense : sparse + (j - 1) * job.dim;
    float sum = 0.0f;
    for (int64_t column = 0; column < job.dim; ++column) {
      sum = fmaf(__ldg(left + column), __ldg(right + column), sum);
    }
    out[job.dim + pair_index(i, j, n, job.upper)] = sum;
  }
}

// Whether the plan says of a feature what lookup_interaction_kernel was compiled for.
template <int64_t T, int Lanes>
__device__ __forceinline__ bool fused_serves(const CudaLookup& job, const FeaturePlan& plan) {
  constexpr int kBytes = Share<T>::kBytes;
  const int64_t last = plan.data_offset + (plan.rows - 1) * plan.row_stride + Lanes * kBytes;
  const bool scales = T == kBlockInt8 ? plan.scale_type == kScaleBook && plan.scale_offset % 4 == 0
                      : T == kInt8    ? has_bias(plan.scale_type)
                                      : plan.scale_type == kNoScale;
  return scales && plan.weight_type == T && plan.dim == Lanes * Share<T>::kColumns &&
         ids_served<Ids::kHashed>(plan) && (plan.data_offset | plan.row_stride) % kBytes == 0 &&
         last <= job.weight_bytes;
}

// Adds a thread's share of a row to `sum`.
template <int64_t T>
__device__ __forceinline__ void add_share(const uint32_t* words, float2 pair, const uint8_t* scales,
                                          Sum<Share<T>::kColumns>* sum) {
  constexpr int C = Share<T>::kColumns;
  if constexpr (T == kBlockInt8) {
    pair.x = __ldg(reinterpret_cast<const float*>(scales) + block_code(words[0]));
  }
  sum->bias = __fadd_rn(sum->bias, pair.y);
  float values[C];
  decode_share<T>(words, values);
#pragma unroll
  for (int c = 0; c < C; ++c) sum->acc[c] = fmaf(pair.x, values[c], sum->acc[c]);
}

// A bag of any feature, a column per thread of the warp.
__device__ void pool_bag_slowly(const CudaLookup& job, const FeaturePlan& plan, int feature,
                                int64_t begin, int count, int64_t dim, float* to) {
  const uint8_t* scales = job.weights + plan.scale_offset;
  for (int64_t column = threadIdx.x % 32; column < dim; column += 32) {
    float acc = 0.0f;
    float bias = 0.0f;
    for (int i = 0; i < count && column < plan.dim; ++i) {
      const int64_t id = load_integer(job.indices, begin + i, job.wide_ids);
      const int32_t row = resolve(job, plan, feature, id, false);
      if (row < 0) continue;
      const uint8_t* data = job.weights + plan.data_offset + row * plan.row_stride;
      float2 pair = make_float2(1.0f, 0.0f);
      if (has_bias(plan.scale_type)) pair = load_scale(plan, scales, static_cast<uint32_t>(row));
      if (plan.weight_type == kBlockInt8) pair.x = block_scale(scales, data, column);
      bias = __fadd_rn(bias, pair.y);
      acc = fmaf(pair.x, decode_column(plan.weight_type, data, column), acc);
    }
    if (has_bias(plan.scale_type)) acc += bias;
    if (plan.pooling == kMean && count > 1) acc = __fdiv_rn(acc, static_cast<float>(count));
    to[column] = acc;
  }
}

// A sample's bags, `Lanes` threads a row, then their products.  Thread k of the warp finds where
// the first row of feature k is, so that these loads travel together; so do the first rows, by
// cp.async into the place that their own vectors will take.  Further ids of a bag follow one by
// one.
template <int64_t T, int Lanes, bool Wide>
__global__ void __launch_bounds__(kMostWarps * 32)
    lookup_interaction_kernel(const __grid_constant__ CudaLookup lookup,
                              const __grid_constant__ CudaInteraction job) {
  constexpr int C = Share<T>::kColumns;
  constexpr int kBytes = Share<T>::kBytes;
  constexpr int kGroups = 32 / Lanes;
  constexpr bool kHasBias = T == kInt8;
  extern __shared__ __align__(16) float shared_vectors[];
  const int stride = row_floats(job.dim);
  const int n = static_cast<int>(job.count) + 1;
  const int64_t sample = blockIdx.x * static_cast<int64_t>(blockDim.x / 32) + threadIdx.x / 32;
  if (sample >= job.batch) return;
  float* vectors = shared_vectors + static_cast<int64_t>(threadIdx.x / 32) * n * stride;
  float* out = job.out + sample * (job.dim + static_cast<int64_t>(n) * job.count / 2);
  const int thread = static_cast<int>(threadIdx.x) % 32;
  const int lane = thread % Lanes;
  const int group = thread / Lanes;
  const int features = static_cast<int>(job.count);

  const auto row_of = [&](const FeaturePlan& plan, int64_t at) {
    return hashed_row(plan, load_integer(lookup.indices, at, Wide));
  };
  for (int first = 0; first < features; first += 32) {
    // The bags of feature `first + thread`.
    int64_t begin = 0;
    int count = 0;
    bool served = true;
    const uint8_t* row_data = lookup.weights;
    float2 pair = make_float2(1.0f, 0.0f);
    if (first + thread < features) {
      const FeaturePlan& plan = lookup.plan[first + thread];
      const int64_t bag = (first + thread) * job.batch + sample;
      begin = load_offset(lookup, bag);
      count = static_cast<int>(max(load_offset(lookup, bag + 1) - begin, int64_t{0}));
      served = fused_serves<T, Lanes>(lookup, plan);
      if (count > 0 && served) {
        const uint32_t row = row_of(plan, begin);
        row_data += plan.data_offset + static_cast<int64_t>(row) * plan.row_stride;
        if (kHasBias) pair = load_scale(plan, lookup.weights + plan.scale_offset, row);
      }
    }
    const unsigned all_served = __ballot_sync(~0u, served);
    const int here = min(features - first, 32);
    const auto vector_of = [&](int k) { return vectors + (1 + first + k) * stride; };
    for (int k = 0; k < here; k += kGroups) {
      // Every thread takes part in the exchange; a group without a feature has nothing to copy.
      const int source = k + group;
      const int64_t from = __shfl_sync(~0u, reinterpret_cast<int64_t>(row_data), source % 32);
      const int size = __shfl_sync(~0u, count, source % 32);
      if (source < here && size > 0 && (all_served >> source & 1) != 0) {
        copy_async<kBytes>(shared_address(vector_of(source)) + lane * kBytes,
                           reinterpret_cast<const uint8_t*>(from) + lane * kBytes);
      }
    }
    asm volatile("cp.async.commit_group;\n cp.async.wait_group 0;" ::: "memory");
    for (int k = 0; k < here; k += kGroups) {
      const int source = k + group;
      const int64_t my_begin = __shfl_sync(~0u, begin, source % 32);
      const int my_count = __shfl_sync(~0u, count, source % 32);
      float2 my_pair;
      my_pair.x = __shfl_sync(~0u, pair.x, source % 32);
      my_pair.y = __shfl_sync(~0u, pair.y, source % 32);
      const bool mine = source < here && (all_served >> (source % 32) & 1) != 0;
      const FeaturePlan& plan = lookup.plan[first + min(source, here - 1)];
      const uint8_t* scales = lookup.weights + plan.scale_offset;
      uint32_t words[kBytes / 4] = {};
      if (mine && my_count > 0) {
        const uint32_t* staged =
            reinterpret_cast<const uint32_t*>(vector_of(source)) + lane * (kBytes / 4);
#pragma unroll
        for (int w = 0; w < kBytes / 4; ++w) words[w] = staged[w];
      }
      __syncwarp();  // what was copied is in registers before vectors are written over it
      if (!mine) continue;
      Sum<C> sum;
      sum.clear();
      if (my_count > 0) add_share<T>(words, my_pair, scales, &sum);
      for (int i = 1; i < my_count; ++i) {
        const uint32_t row = row_of(plan, my_begin + i);
        const uint8_t* from = lookup.weights + plan.data_offset +
                              static_cast<int64_t>(row) * plan.row_stride + lane * kBytes;
#pragma unroll
        for (int w = 0; w < kBytes / 4; ++w) {
          words[w] = __ldg(reinterpret_cast<const uint32_t*>(from) + w);
        }
        if (kHasBias) my_pair = load_scale(plan, scales, row);
        add_share<T>(words, my_pair, scales, &sum);
      }
      float4* to = reinterpret_cast<float4*>(vector_of(source) + lane * C);
      const bool mean = plan.pooling == kMean && my_count > 1;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if (kHasBias) sum.acc[c] += sum.bias;
        if (mean) sum.acc[c] = __fdiv_rn(sum.acc[c], static_cast<float>(my_count));
      }
#pragma unroll
      for (int c = 0; c < C; c += 4) {
        to[c / 4] = make_float4(sum.acc[c], sum.acc[c + 1], sum.acc[c + 2], sum.acc[c + 3]);
      }
    }
    for (int k = 0; all_served != ~0u && k < here; ++k) {
      const int64_t bag_begin = __shfl_sync(~0u, begin, k);
      const int size = __shfl_sync(~0u, count, k);
      if ((all_served >> k & 1) != 0) continue;
      pool_bag_slowly(lookup, lookup.plan[first + k], first + k, bag_begin, size, job.dim,
                      vector_of(k));
    }
  }
  take_dense(job, sample, vectors, out);
  clear_tails(job, vectors, stride);
  __syncwarp();
  multiply_pairs(vectors, stride, n, static_cast<int>(job.dim), job.upper, out + job.dim);
}

// Warps of a block whose vectors fit; 0: not even one sample's do.
int warps_that_fit(const CudaInteraction& job) {
  const int64_t bytes = (job.count + 1) * row_floats(job.dim) * int64_t{4};
  const int64_t warps = kMostShared / bytes;
  return static_cast<int>(warps < kMostWarps ? warps : kMostWarps);
}

template <class Kernel, class... Jobs>
cudaError_t launch(Kernel kernel, const CudaInteraction& job, int warps, cudaStream_t stream,
                   const Jobs&... jobs) {
  const int bytes = static_cast<int>(warps * (job.count + 1) * row_floats(job.dim) * 4);
  if (bytes > kSharedWithoutAsking) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
  }
  const int64_t blocks = (job.batch + warps - 1) / warps;
  kernel<<<static_cast<unsigned>(blocks), warps * 32, bytes, stream>>>(jobs...);
  return cudaGetLastError();
}

template <int64_t T, int Lanes>
cudaError_t launch_fused(const CudaLookup& lookup, const CudaInteraction& job, int warps,
                         cudaStream_t stream) {
  return lookup.wide_ids
             ? launch(lookup_interaction_kernel<T, Lanes, true>, job, warps, stream, lookup, job)
             : launch(lookup_interaction_kernel<T, Lanes, false>, job, warps, stream, lookup, job);
}

template <int64_t T>
bool launch_fused(const CudaLookup& lookup, const CudaInteraction& job, int warps,
                  cudaStream_t stream, cudaError_t* status) {
  switch (lookup.lanes) {
    case 4: *status = launch_fused<T, 4>(lookup, job, warps, stream); return true;
    case 8: *status = launch_fused<T, 8>(lookup, job, warps, stream); return true;
    case 16: *status = launch_fused<T, 16>(lookup, job, warps, stream); return true;
    default: return false;
  }
}

}  // namespace

cudaError_t launch_interaction(const CudaInteraction& job, cudaStream_t stream) {
  const int warps = warps_that_fit(job);
  if (warps == 0) {
    interaction_slow_kernel<<<static_cast<unsigned>(job.batch), 256, 0, stream>>>(job);
    return cudaGetLastError();
  }
  return launch(interaction_kernel, job, warps, stream, job);
}

bool launch_lookup_interaction(const CudaLookup& lookup, const CudaInteraction& job,
                               cudaStream_t stream, cudaError_t* status) {
  constexpr int64_t kMostIdsPerBag = 3;
  const int warps = warps_that_fit(job);
  const int64_t columns = lookup.weight_type == kFloat16 ? 8 : 16;
  // Whole shares fill the vectors, so what is staged in a vector's place fits there.
  if (warps == 0 || !lookup.one_width || job.dim != lookup.lanes * columns ||
      lookup.alike == Alike::kNo || lookup.id_weights != nullptr || lookup.outside != nullptr ||
      lookup.ids > kMostIdsPerBag * lookup.features * lookup.batch) {
    return false;
  }
  if (lookup.weight_type == kBlockInt8) {
    return launch_fused<kBlockInt8>(lookup, job, warps, stream, status);
  }
  if (lookup.weight_type == kInt8) return launch_fused<kInt8>(lookup, job, warps, stream, status);
  if (lookup.weight_type == kFloat16)
    return launch_fused<kFloat16>(lookup, job, warps, stream, status);
  return false;
}

}  // namespace tessera
