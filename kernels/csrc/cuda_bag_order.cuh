// Which long bags work side by side.
//
// A warp works until the last of its groups has ended, and a block until the last of its warps has:
// of four bags with 0 to 2 n ids the longest has 1.6 n on average, of sixteen 1.9 n.  So the bags
// of up to four neighbouring tiles, which have one bag for each group, are ordered by their
// lengths, the longest first, and tiles take them in that order.
#pragma once

#include "cuda_loads.cuh"

namespace tessera {
namespace {

constexpr int kOrderThreads = 128;  // of a block

// How tiles take long bags.
enum class Beside : int {
  kAsTheyCome,
  kAlikeInTile,  // of one tile: in a call of few blocks those of the longest bags would end last
  kAlikeInWindow,
};

// Ids of a bag, on average, above which bags are ordered: at 20 of one length asking whether
// lengths differ costs 1 to 3%.
constexpr int64_t kOrderedIds = 20;
constexpr int kWindowBags = 64;  // of several tiles, at most
// How often its blocks must fill the machine before a call orders the bags of several tiles.
constexpr int64_t kWindowRounds = 4;

// `resident`: blocks that the machine holds at once.
inline Beside beside_of(const CudaLookup& job, int bags_per_group, int64_t blocks,
                        int64_t resident) {
  if (bags_per_group > 1 || job.ids <= kOrderedIds * job.features * job.batch ||
      2 * blocks < resident) {
    return Beside::kAsTheyCome;
  }
  return blocks >= kWindowRounds * resident ? Beside::kAlikeInWindow : Beside::kAlikeInTile;
}

// The bags, of a feature, that a tile is ordered with.
struct Window {
  int first;
  int bags;
  int before;  // how many of them come before the tile's
};

__device__ __forceinline__ Window window_of(const CudaLookup& job, int tile, int groups,
                                            Beside beside) {
  int shift = 4 * groups <= kWindowBags ? 2 : 2 * groups <= kWindowBags ? 1 : 0;
  if (beside != Beside::kAlikeInWindow) shift = 0;
  const int number = tile >> shift;
  const int first = (number << shift) * groups;
  const int bags = min(static_cast<int>(job.batch) - first, groups << shift);
  // Windows begin with different tiles, or else a multiprocessor might get the longest of each.
  const int turn = bags == groups << shift ? number : 0;
  return Window{first, bags, ((tile + turn) & ((1 << shift) - 1)) * groups};
}

// Whether bags of a window are not as long as each other; it may be missed.
__device__ __forceinline__ bool lengths_differ(const CudaLookup& job, int of_feature,
                                               const Window& window) {
  const int64_t at = of_feature + window.first;
  const int64_t begin = load_integer(job.offsets, at, job.wide_offsets);
  const int64_t next = load_integer(job.offsets, at + 1, job.wide_offsets);
  const int64_t end = load_integer(job.offsets, at + window.bags, job.wide_offsets);
  return end - begin != (next - begin) * window.bags;
}

// What ordered_bag() keeps in shared memory.
struct BagOrder {
  int4 keys[kOrderThreads / 4];
  uint8_t bags[kOrderThreads];
};

// The bag of a group, or -1.  All threads of a block of kOrderThreads call it, those that belong
// to no group with a number past the last one.
//
// `of_feature`: the number of the feature's first bag.  Wrong offsets cost time only.
__device__ __forceinline__ int ordered_bag(const CudaLookup& job, int of_feature,
                                           const Window& window, int groups, int group,
                                           BagOrder* order) {
  constexpr int kLongest = (1 << 23) - 1;
  static_assert(kOrderThreads <= 256 && kWindowBags <= kOrderThreads, "numbers of 8 bits");
  const int thread = static_cast<int>(threadIdx.x);
  int* const keys = reinterpret_cast<int*>(order->keys);
  int key = -1;  // comes last
  if (thread < window.bags) {
    const int64_t at = of_feature + window.first + thread;
    const int64_t length = load_integer(job.offsets, at + 1, job.wide_offsets) -
                           load_integer(job.offsets, at, job.wide_offsets);
    key = static_cast<int>(min(max(length, int64_t{0}), int64_t{kLongest})) << 8 | (255 - thread);
  }
  keys[thread] = key;
  __syncthreads();
  if (thread < window.bags) {
    int rank = 0;
#pragma unroll 4
    for (int k = 0; k < (window.bags + 3) / 4; ++k) {
      const int4 four = order->keys[k];
      rank += (four.x > key ? 1 : 0) + (four.y > key ? 1 : 0) + (four.z > key ? 1 : 0) +
              (four.w > key ? 1 : 0);
    }
    if (rank >= window.before && rank < window.before + groups) {
      order->bags[rank - window.before] = static_cast<uint8_t>(thread);
    }
  }
  __syncthreads();
  const bool mine = group < groups && window.before + group < window.bags;
  return mine ? window.first + order->bags[group] : -1;
}

}  // namespace
}  // namespace tessera
