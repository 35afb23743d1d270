// Chooses among the kernels of cuda_quick.cuh, which are compiled here.
#include "cuda_quick.h"

#include "cuda_kinds.cuh"
#include "cuda_quick.cuh"

namespace tessera {
namespace {

// Ids of a bag, on average, up to which rows may have several passes, and up to which bags are
// short.
constexpr int64_t kQuickPassedIds = 4;
constexpr int64_t kQuickMostIds = 8;
// Warps for each multiprocessor, with one pass a row, up to which a row has one: bags of one id, of
// about one and of several; up to which it has two, and up to which calls are of few bags.
constexpr int64_t kQuickOnePassOfOne = 9;
constexpr int64_t kQuickOnePassOfFew = 3;
constexpr int64_t kQuickOnePassOfSeveral = 15;
constexpr int64_t kQuickTwoPasses = 48;
constexpr int64_t kQuickMostWarps = 96;
// Bags for each multiprocessor up to which they are few, however narrow their rows are.
constexpr int64_t kQuickMostBags = 150;
// Ids that a warp reads in front of where those of its bags would begin, where bags differ.
constexpr int kQuickBefore = 28;

using QuickKernel = void (*)(QuickForm, CudaLookup);

// How many ids are read together, and passes of a row.
struct QuickShape {
  int together;
  int passes;
};

QuickKernel quick_for(const CudaLookup& job, QuickShape shape) {
  return kernel_for<QuickKernel>(job, [&](auto kind) -> QuickKernel {
    using K = decltype(kind);
    constexpr int64_t T = K::kWeights;
    constexpr Scales S = K::kScales;
    constexpr Ids I = K::kIds;
    if constexpr (S != Scales::kBook) {  // where it is not faster
      if (shape.together == 1) return lookup_quick_kernel<1, 1, T, S, I, K::kWide>;
    }
    if (shape.together == 4) return lookup_quick_kernel<4, 1, T, S, I, K::kWide>;
    if (shape.passes == 1) return lookup_quick_kernel<2, 1, T, S, I, K::kWide>;
    return shape.passes == 2 ? lookup_quick_kernel<2, 2, T, S, I, K::kWide>
                             : lookup_quick_kernel<2, 4, T, S, I, K::kWide>;
  });
}

// Lanes of a bag, as a power of two, and how often they cover the widest row in so many passes.
struct Spread {
  int lane_bits = 0;
  int64_t slabs;

  Spread(int64_t widest, int64_t passes) {
    while (lane_bits < 5 && passes << lane_bits < widest) ++lane_bits;
    slabs = (widest + (passes << lane_bits) - 1) / (passes << lane_bits);
  }
};

// {0, 0}: other kernels are faster.
QuickShape shape_of(int64_t bags, int64_t ids, int64_t widest, int multiprocessors) {
  const Spread spread(widest, 1);
  const int64_t warps = (bags * spread.slabs << spread.lane_bits) / 32;
  const auto at_most = [&](int64_t most) { return warps <= most * multiprocessors; };
  if (!at_most(kQuickMostWarps) || bags > kQuickMostBags * multiprocessors ||
      ids > kQuickMostIds * bags) {
    return {0, 0};
  }
  if (2 * ids > 3 * bags) {
    if (at_most(kQuickOnePassOfSeveral)) return {4, 1};
    if (ids > kQuickPassedIds * bags) return {0, 0};
  } else if (ids == bags && at_most(kQuickOnePassOfOne)) {
    return {1, 1};
  } else if (at_most(kQuickOnePassOfFew)) {
    return {2, 1};
  }
  return {2, at_most(kQuickTwoPasses) ? 2 : 4};
}

}  // namespace

bool launch_quick(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                  cudaError_t* status) {
  if (job.alike == Alike::kNo || job.id_weights != nullptr || job.outside != nullptr ||
      job.widest_shares <= 0 || job.widest_shares >= kMostShares) {
    return false;
  }
  const int64_t bags = job.features * job.batch;
  const int64_t widest = few_lanes(job);
  const QuickShape shape = shape_of(bags, job.ids, widest, multiprocessors);
  if (shape.together == 0) return false;
  const QuickKernel kernel = quick_for(job, shape);
  if (kernel == nullptr) return false;
  const Spread spread(widest, shape.passes);
  QuickForm form;
  form.lane_bits = spread.lane_bits;
  form.mean = static_cast<uint32_t>((job.ids << kQuickMeanBits) / bags);
  form.before = job.ids == bags ? 0 : kQuickBefore;
  form.offset_bytes = job.wide_offsets ? 8 : 4;
  int threads = kQuickThreads;
  while (threads > 32 && threads / 2 >> spread.lane_bits >= job.batch) threads /= 2;
  const int64_t in_block = threads >> spread.lane_bits;
  const dim3 grid(static_cast<unsigned>((job.batch + in_block - 1) / in_block),
                  static_cast<unsigned>(job.features + (job.dense != nullptr ? 1 : 0)),
                  static_cast<unsigned>(spread.slabs));
  kernel<<<grid, threads, 0, stream>>>(form, job);
  *status = cudaGetLastError();
  return true;
}

}  // namespace tessera
