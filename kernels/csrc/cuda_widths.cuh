// Features of one kind and any width: every feature has one weight type and one way to keep scales,
// and nothing is weighted or counted.  Widths, poolings and places in the output may differ.
//
// A row of n shares (16 columns of one byte each, for instance) is read by a group of n
// neighbouring threads, whatever n is: a block of 128 threads holds 21 groups for rows of 6 shares,
// and a group may begin in one warp and end in the next.  Each thread copies its own bytes into its
// own ring slots and loads the ids itself.  Rows of more shares than a block has threads are read
// in several passes.
//
// Long bags go to blocks and groups by their lengths (Beside).
//
// Where all rows have one number of shares, blockIdx.y is the feature and blockIdx.x a tile of its
// bags, as in the other kernels.  Else the tiles of all features are numbered one after the other
// and a warp finds the feature of a tile by adding up how many tiles each has: so a block of a
// narrow feature has as much to do as one of a wide feature, and few blocks leave without work. For
// a call of few tiles, or very many features, that search would take longer than it saves; then
// blockIdx.y is the feature again.
//
// Three pipes: the usual one; one whose threads read 16 bytes of an int4 row, too, for rows of many
// shares; and one with 64 rows in flight per thread for calls that have too few bags to fill the
// machine, where the longest bag decides.  Rows of the first two stay in the first cache: under a
// power law a few rows are asked for so often that the slice of the second cache in which they lie
// would be the limit.  The third leaves that cache so little room that only rows of ids which a
// warp sees repeat, and scales beside their rows, are worth it.
#pragma once

#include <cstddef>

#include "cuda_express.cuh"

namespace tessera {
namespace {

using WidePipe = Pipe<kExpressThreads, kRing, kStep, kExpressBlocks, Cache::kThrough>;
using WideInt4Pipe = Pipe<kExpressThreads, kRing, kStep, 5, Cache::kThrough, 2>;
using DeepPipe = Pipe<32, 64, 8, 5, Cache::kAsked>;

constexpr int kWidthsBags = kExpressBags;
constexpr int64_t kSector = 32;  // bytes that a cache fetches together
// A call of fewer ids does not keep a slice of the second cache busy with its most frequent row.
constexpr int64_t kHotIds = 1 << 16;
constexpr int kRepeats = 4;            // ids of 32 that are not the only ones of their kind
constexpr int64_t kMostSearched = 64;  // features of different widths whose tiles are numbered

// Blocks that share a multiprocessor.  Row scales take more registers: with 64 they spill.
template <class P>
constexpr int blocks_of(Scales scales) {
  return scales == Scales::kRow && P::kBlocks > 7 ? 7 : P::kBlocks;
}

// How the tiles of a call lie in the grid.
struct Tiling {
  int bags_per_group;
  bool numbered;  // over all features; else blockIdx.y picks the feature
  bool ordered;   // in launch order, which is read first
  Beside beside;  // of bags, where each group has one
};

// Threads that read a row of `dim` columns.
template <class P, int64_t T>
__device__ __forceinline__ int widths_lanes(int64_t dim) {
  const int64_t parts = (dim + PartOf<P, T>::kColumns - 1) / PartOf<P, T>::kColumns;
  return static_cast<int>(min(parts, int64_t{P::kThreads}));
}

// Whether the plan says of a feature what the kernel was compiled for.
template <class P, int64_t T, Scales S, Ids I>
__device__ __forceinline__ bool widths_serve(const CudaLookup& job, const FeaturePlan& plan) {
  constexpr int kBytes = PartOf<P, T>::kBytes;
  const int64_t parts = (plan.dim + PartOf<P, T>::kColumns - 1) / PartOf<P, T>::kColumns;
  const int64_t last = plan.data_offset + (plan.rows - 1) * plan.row_stride + parts * kBytes;
  return plan.weight_type == T && scales_served<T, S>(plan) && ids_served<I>(plan) &&
         (plan.data_offset | plan.row_stride) % kBytes == 0 && plan.row_stride <= 0x7fffffff &&
         last <= job.weight_bytes && plan.out_column + plan.dim <= job.out_width;
}

struct Tile {
  int feature;
  int number;  // of the feature's tiles
  int all;     // of all features
};

// The tile that has number `at` of all features' tiles, in launch order; feature -1: there are not
// so many.  All threads of a warp call it.
template <class P, int64_t T>
__device__ __forceinline__ Tile find_tile(const CudaLookup& job, int at, int bags_per_group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Tile found{-1, 0, 0};
  for (int64_t first = 0; first < job.features; first += 32) {
    int feature = 0;
    int tiles = 0;
    if (first + lane < job.features) {
      feature = ordered_feature(job, first + lane);
      const int lanes = widths_lanes<P, T>(job.plan[feature].dim);
      const int bags = small_quotient(P::kThreads, lanes) * bags_per_group;
      tiles = (static_cast<int>(job.batch) + bags - 1) / bags;
    }
    int end = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end += before;
    }
    end += found.all;
    const unsigned behind = __ballot_sync(~0u, at < end);
    if (behind != 0 && found.feature < 0) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      found.number = at - __shfl_sync(~0u, end - tiles, owner);
      found.feature = __shfl_sync(~0u, feature, owner);
    }
    found.all = __shfl_sync(~0u, end, 31);
  }
  return found;
}

// Whether several of the 32 ids from a bag's first one on, which are likely the warp's, are the
// same: then they follow a power law, or the table is small.  All threads of a warp call it.
template <bool Wide>
__device__ __forceinline__ bool ids_repeat(const CudaLookup& job, int bag) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = load_offset(job, bag) + lane;
  int id = -1 - lane;
  if (at < job.ids) id = static_cast<int>(load_integer(job.indices, at, Wide));
  const unsigned same = __match_any_sync(~0u, id);
  return __popc(__ballot_sync(~0u, (same & (same - 1)) != 0)) >= kRepeats;
}

// Where the bags of a group end, counted from the group's first id, by thread; under Scales::kRow
// without the last one, so that seven blocks leave the first cache 92 KB.  An order of bags is only
// there where each group has one, and is no longer read when the end of that is known.
template <class P, Scales S>
union BagEnds {
  static constexpr int kKept = S == Scales::kRow ? kWidthsBags - 1 : kWidthsBags;
  int of[kKept][P::kThreads];
  BagOrder order;
};
static_assert(offsetof(BagOrder, bags) >= sizeof(int) * kExpressThreads);

// One tile of a feature that widths_serve().  All threads of a block call it.
template <class P, int64_t T, Scales S, Ids I, bool Wide>
__device__ __forceinline__ void sum_tile(const CudaLookup& job, const FeaturePlan& plan,
                                         const volatile BagShape& shape, const Tile& tile,
                                         const Tiling& tiling, uint8_t* ring, BagEnds<P, S>* ends,
                                         const float* book) {
  constexpr int C = PartOf<P, T>::kColumns;
  const int thread = static_cast<int>(threadIdx.x);
  const int lanes = widths_lanes<P, T>(plan.dim);
  const int groups = small_quotient(P::kThreads, lanes);
  const int group = small_quotient(thread, lanes);
  const int lane = thread - group * lanes;
  const int of_feature = tile.feature * static_cast<int>(job.batch);
  // A scale lies where the copy of its row brings it along, if the row is a sector with it.
  bool keeps = false;
  if constexpr (P::kCache == Cache::kAsked) {
    keeps =
        (S == Scales::kRow && plan.scale_stride == plan.row_stride && plan.row_stride <= kSector) ||
        (job.ids > kHotIds &&
         ids_repeat<Wide>(job, of_feature + tile.number * groups * tiling.bags_per_group));
  }
  int first_bag = (tile.number * groups + group) * tiling.bags_per_group;
  int bags =
      group >= groups ? 0 : min(static_cast<int>(job.batch) - first_bag, tiling.bags_per_group);
  if constexpr (P::kThreads == kExpressThreads) {
    if (tiling.beside != Beside::kAsTheyCome) {
      const Window window = window_of(job, tile.number, groups, tiling.beside);
      if (lengths_differ(job, of_feature, window)) {
        first_bag = ordered_bag(job, of_feature, window, groups, group, &ends->order);
        bags = first_bag < 0 ? 0 : 1;
      }
    }
  }
  // Threads without bags go on where others wait for them.
  if (S != Scales::kRow && bags <= 0) return;
  int64_t begin = 0;
  int last_end = 0;
  if (bags > 0) {
    const int at = of_feature + first_bag;
    begin = load_offset(job, at);
    last_end = static_cast<int>(load_offset(job, at + bags) - begin);
    if (tiling.bags_per_group > 1) {
#pragma unroll
      for (int k = 0; k < BagEnds<P, S>::kKept; ++k) {
        ends->of[k][thread] = static_cast<int>(load_offset(job, at + min(k + 1, bags)) - begin);
      }
    } else if constexpr (S != Scales::kRow) {
      ends->of[0][thread] = last_end;
    }
  }
  Piece piece;
  piece.scales = job.weights + plan.scale_offset;
  piece.ids = static_cast<const uint8_t*>(job.indices) + begin * (Wide ? 8 : 4);
  piece.count = max(last_end, 0);
  piece.bags = bags;
  piece.ring = ring;
  piece.leader = max(thread - lane, thread / 32 * 32);
  piece.team = min(thread - lane + lanes, thread / 32 * 32 + 32) - piece.leader;
  piece.keeps = keeps;
  piece.book = book;
  const auto end_of = [&](int bag) {
    if constexpr (S == Scales::kRow) {
      if (bag == bags - 1) return last_end;
    }
    return ends->of[bag][thread];
  };
  for (int pass = 0; pass < shape.dim; pass += P::kThreads * C) {
    if (pass > 0 && pass + thread / 32 * 32 * C >= shape.dim) break;
    const int column = pass + lane * C;
    // A thread behind the last column reads the first ones and writes nothing.
    piece.data = job.weights + plan.data_offset +
                 (column < shape.dim ? column : 0) / C * PartOf<P, T>::kBytes;
    int64_t out = first_bag * job.out_width + shape.out_column + column;
    const auto write = [&](Sum<C>* sum, int bag) {
      constexpr bool kHasBias = express_has_bias(T, S);
      const int columns = shape.dim - column;
      if (shape.plain_half && columns > 0) {
        sum->template write_half<OutType::kFloat16>(job, out, kHasBias);
      } else {
        float divisor = 1.0f;
        if (shape.mean) {
          divisor = static_cast<float>(end_of(bag) - (bag == 0 ? 0 : end_of(bag - 1)));
        }
        if (shape.stores == Stores::kSingle) {
          sum->write(job, out, columns, false, kHasBias, divisor);
        } else {
          sum->write_quads(job, out, columns, kHasBias, divisor);
        }
      }
      out += job.out_width;
    };
    stream_alike<P, T, S, I, kAnyWidth, Wide>(plan, piece, end_of, write);
  }
}

// Asks for the offsets that the block is likely to need, while the plan is read: its own where
// features have one number of shares, else a feature's first.
template <class P, int64_t T>
__device__ __forceinline__ void warm_offsets(const CudaLookup& job, int bags_per_group) {
  int64_t bag = threadIdx.x;
  if (job.one_share_count) {
    constexpr int kShares = PartOf<P, T>::kShares;
    const int64_t parts = (job.widest_shares + kShares - 1) / kShares;
    const int lanes = static_cast<int>(min(max(parts, int64_t{1}), P::kThreads + 0l));
    bag = (static_cast<int64_t>(blockIdx.x) * small_quotient(P::kThreads, lanes) +
           small_quotient(static_cast<int>(threadIdx.x), lanes)) *
          bags_per_group;
  }
  const int64_t at = blockIdx.y * job.batch + min(bag, job.batch);
  // Nothing waits for the values, which the compiler is told are used.
  if (job.wide_offsets) {
    asm volatile("" ::"l"(__ldg(static_cast<const long long*>(job.offsets) + at)));
  } else {
    asm volatile("" ::"r"(__ldg(static_cast<const int*>(job.offsets) + at)));
  }
}

template <class P, int64_t T, Scales S, Ids I, bool Wide>
__global__ void __launch_bounds__(P::kThreads, blocks_of<P>(S))
    lookup_widths_kernel(const __grid_constant__ CudaLookup job, const Tiling tiling) {
  constexpr int kWarps = P::kThreads / 32;
  extern __shared__ __align__(kRingAlignment) uint8_t ring[];
  __shared__ float books[kWarps][kBookScales];
  __shared__ BagShape shapes[kWarps];
  __shared__ FeaturePlan plans[kWarps];
  __shared__ BagEnds<P, S> ends;
  if (blockIdx.y == (tiling.numbered ? 1 : job.features)) {
    copy_dense(job);
    return;
  }
  float* const book = books[threadIdx.x / 32];
  BagShape& shape = shapes[threadIdx.x / 32];
  FeaturePlan& plan = plans[threadIdx.x / 32];
  if (!tiling.numbered) warm_offsets<P, T>(job, tiling.bags_per_group);
  for (int64_t at = blockIdx.x;; at += gridDim.x) {
    Tile tile{0, static_cast<int>(at), 0};
    if (tiling.numbered) {
      tile = find_tile<P, T>(job, static_cast<int>(at), tiling.bags_per_group);
      if (tile.feature < 0) return;
      fetch_plan(job, tile.feature, &plan);
    } else {
      tile.feature = static_cast<int>(blockIdx.y);
      fetch_plan(job, tile.feature, &plan);
      const int ordered = clamp_feature(job, plan.launch_order);
      if (tiling.ordered && ordered != tile.feature) {
        tile.feature = ordered;
        fetch_plan(job, ordered, &plan);
      }
    }
    const int lanes = widths_lanes<P, T>(plan.dim);
    const int bags = small_quotient(P::kThreads, lanes) * tiling.bags_per_group;
    if (static_cast<int64_t>(tile.number) * bags >= job.batch) return;
    if (widths_serve<P, T, S, I>(job, plan)) {
      share_shape(job, plan, PartOf<P, T>::kColumns, &shape);
      if constexpr (S == Scales::kBook) load_book(job.weights + plan.scale_offset, book);
      sum_tile<P, T, S, I, Wide>(job, plan, shape, tile, tiling, ring, &ends, book);
    } else {
      stream_bags_slowly(job, plan, tile.feature, bags, tile.number, job.batch);
    }
    const int64_t next = at + gridDim.x;
    if (tiling.numbered ? next >= tile.all : next * bags >= job.batch) return;
    __syncthreads();  // nobody reads the tile that is replaced
  }
}

}  // namespace
}  // namespace tessera
