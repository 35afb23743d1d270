// Features of one kind and any width: every feature has one weight type and one way to keep scales,
// and nothing is weighted or counted.  Widths, poolings and places in the output may differ.
//
// A row of n shares (16 columns of one byte each, for instance) is read by a group of n neighbouring
// threads, whatever n is: a block of 128 threads holds 21 groups for rows of 6 shares, and a group
// may begin in one warp and end in the next.  That needs no exchange between threads: each one copies
// its own bytes into its own ring slots, loads the ids itself, and keeps the ends of its bags in
// shared memory.  Rows of more than 128 shares are read in several passes.
//
// Where all rows have one number of shares, blockIdx.y is the feature and blockIdx.x a tile of its
// bags, as in the other kernels.  Else the tiles of all features are numbered one after the other and
// a warp finds the feature of a tile by adding up how many tiles each has: so a block of a narrow
// feature has as much to do as one of a wide feature, and few blocks leave without work.  With very
// many features that search would take longer than it saves; then blockIdx.y is the feature again.
#pragma once

#include "cuda_express.cuh"

namespace tessera {
namespace {

constexpr int64_t kMostSearched = 64;  // features of different widths whose tiles are numbered

// Threads that read a row of `dim` columns.
template <int64_t T>
__device__ __forceinline__ int widths_lanes(int64_t dim) {
  const int64_t shares = (dim + Share<T>::kColumns - 1) / Share<T>::kColumns;
  return static_cast<int>(min(shares, int64_t{kExpressThreads}));
}

// Whether the plan says of a feature what the kernel was compiled for.
template <int64_t T, Scales S, Ids I>
__device__ __forceinline__ bool widths_serve(const CudaLookup& job, const FeaturePlan& plan) {
  constexpr int kBytes = Share<T>::kBytes;
  const int64_t shares = (plan.dim + Share<T>::kColumns - 1) / Share<T>::kColumns;
  const int64_t last = plan.data_offset + (plan.rows - 1) * plan.row_stride + shares * kBytes;
  return plan.weight_type == T && scales_served<T, S>(plan) && ids_served<I>(plan) &&
         (plan.data_offset | plan.row_stride) % kBytes == 0 && plan.row_stride <= 0x7fffffff &&
         last <= job.weight_bytes && plan.out_column + plan.dim <= job.out_width;
}

struct Tile {
  int feature;
  int number;  // of the feature's tiles
};

// The tile that has number `at` of all features' tiles, in launch order; feature -1: there are not so
// many.  All threads of a warp call it.
template <int64_t T>
__device__ __forceinline__ Tile find_tile(const CudaLookup& job, int at, int bags_per_group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t first = 0; first < job.features; first += 32) {
    int feature = 0;
    int tiles = 0;
    if (first + lane < job.features) {
      feature = ordered_feature(job, first + lane);
      const int bags = kExpressThreads / widths_lanes<T>(job.plan[feature].dim) * bags_per_group;
      tiles = (static_cast<int>(job.batch) + bags - 1) / bags;
    }
    int end = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end += before;
    }
    const unsigned behind = __ballot_sync(~0u, at < end);
    if (behind != 0) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      const int begin = __shfl_sync(~0u, end - tiles, owner);
      return {__shfl_sync(~0u, feature, owner), at - begin};
    }
    at -= __shfl_sync(~0u, end, 31);
  }
  return {-1, 0};
}

// One tile of a feature that widths_serve().
template <int64_t T, Scales S, Ids I, bool Wide>
__device__ __forceinline__ void sum_tile(const CudaLookup& job, const FeaturePlan& plan,
                                         const volatile BagShape& shape, const Tile& tile,
                                         int bags_per_group, uint8_t* ring,
                                         int (*ends)[kExpressThreads], const float* book) {
  constexpr int C = Share<T>::kColumns;
  const int lanes = widths_lanes<T>(plan.dim);
  const int groups = kExpressThreads / lanes;
  const int group = static_cast<int>(threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) - group * lanes;
  const int first_bag = (tile.number * groups + group) * bags_per_group;
  const int bags = min(static_cast<int>(job.batch) - first_bag, bags_per_group);
  if (group >= groups || bags <= 0) return;
  const int at = tile.feature * static_cast<int>(job.batch) + first_bag;
  const int64_t begin = load_offset(job, at);
  int last_end = 0;
#pragma unroll
  for (int k = 0; k < kExpressBags; ++k) {
    const int end = static_cast<int>(load_offset(job, at + min(k + 1, bags)) - begin);
    ends[k][threadIdx.x] = end;
    last_end = end;
  }
  Piece piece;
  piece.scales = job.weights + plan.scale_offset;
  piece.ids = static_cast<const uint8_t*>(job.indices) + begin * (Wide ? 8 : 4);
  piece.count = max(last_end, 0);
  piece.bags = bags;
  piece.ring = ring;
  piece.book = book;
  const auto end_of = [&](int bag) { return ends[bag][threadIdx.x]; };
  for (int column = lane * C; column < shape.dim; column += kExpressThreads * C) {
    piece.data = job.weights + plan.data_offset + column / C * Share<T>::kBytes;
    int64_t out = first_bag * job.out_width + shape.out_column + column;
    const auto write = [&](Sum<C>* sum, int bag) {
      constexpr bool kHasBias = express_has_bias(T, S);
      if (shape.plain_half) {
        sum->write_half(job, out, kHasBias);
      } else {
        float divisor = 1.0f;
        if (shape.mean) {
          divisor = static_cast<float>(end_of(bag) - (bag == 0 ? 0 : end_of(bag - 1)));
        }
        const int columns = shape.dim - column;
        if (shape.stores == Stores::kSingle) {
          sum->write(job, out, columns, false, kHasBias, divisor);
        } else {
          sum->write_quads(job, out, columns, kHasBias, divisor);
        }
      }
      out += job.out_width;
    };
    stream_alike<T, S, I, kAnyWidth, Wide>(plan, piece, end_of, write);
  }
}

// `numbered`: tiles are numbered over all features; else blockIdx.y picks the feature.
template <int64_t T, Scales S, Ids I, bool Wide>
__global__ void __launch_bounds__(kExpressThreads, kExpressBlocks)
    lookup_widths_kernel(const __grid_constant__ CudaLookup job, int bags_per_group,
                         bool numbered) {
  extern __shared__ __align__(16) uint8_t ring[];
  __shared__ float books[kExpressThreads / 32][kBookScales];
  __shared__ BagShape shapes[kExpressThreads / 32];
  __shared__ int ends[kExpressBags][kExpressThreads];
  if (blockIdx.y == (numbered ? 1 : job.features)) {
    copy_dense(job);
    return;
  }
  float* const book = books[threadIdx.x / 32];
  BagShape& shape = shapes[threadIdx.x / 32];
  for (int64_t at = blockIdx.x;; at += gridDim.x) {
    Tile tile{0, static_cast<int>(at)};
    if (numbered) {
      tile = find_tile<T>(job, static_cast<int>(at), bags_per_group);
      if (tile.feature < 0) return;
    } else {
      tile.feature = feature_of_block(job);
    }
    const FeaturePlan& plan = job.plan[tile.feature];
    const int bags = kExpressThreads / widths_lanes<T>(plan.dim) * bags_per_group;
    if (static_cast<int64_t>(tile.number) * bags >= job.batch) return;
    if (widths_serve<T, S, I>(job, plan)) {
      __syncwarp();  // the tile before is written
      share_shape(job, plan, Share<T>::kColumns, &shape);
      if constexpr (S == Scales::kBook) load_book(job.weights + plan.scale_offset, book);
      sum_tile<T, S, I, Wide>(job, plan, shape, tile, bags_per_group, ring, ends, book);
    } else {
      stream_bags_slowly(job, plan, tile.feature, bags, tile.number, job.batch);
    }
  }
}

}  // namespace
}  // namespace tessera
