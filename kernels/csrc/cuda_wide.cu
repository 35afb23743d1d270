// Chooses among the kernels of cuda_wide.cuh, which are compiled here.
#include "cuda_wide.h"

#include <algorithm>

#include "cuda_kinds.cuh"
#include "cuda_wide.cuh"

namespace tessera {
namespace {

// Ids of a bag, on average, up to which bags are short.
constexpr int64_t kWideIds = 12;
// The same where every bag has a warp at once.  A warp waits once for every four rows of the
// longest bag, so that at 25 and more the pipe of 64 rows is faster.
constexpr int64_t kWideIdsOfFew = 16;
// The same where widths differ: narrow rows of longer bags are read faster by other kernels.
constexpr int64_t kWideIdsOfMixed = 2;
// Columns of the widest row from which on bags of one id are read here, and how many passes each
// warp must have of them: those of cuda_short.cuh take fewer instructions up to there.
constexpr int64_t kWideFromOne = 512;
constexpr int64_t kWideFewestOne = 3;
// Ids of a warp where bags have more than that: they differ in length, and several rounds of
// blocks even that out.
constexpr int64_t kWideIdsOfWarp = 12;
// Passes that a warp makes where widths differ, at most, and rounds of blocks up to which those of
// a row are side by side there.
constexpr int64_t kWidePasses = 32;
constexpr int64_t kWideRounds = 5;

using WideKernel = void (*)(CudaLookup, int);

WideKernel wide_for(const CudaLookup& job) {
  return kernel_for<WideKernel>(job, [](auto kind) -> WideKernel {
    using K = decltype(kind);
    return lookup_wide_kernel<K::kWeights, K::kScales, K::kIds, K::kWide>;
  });
}

}  // namespace

bool launch_wide_rows(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                      cudaError_t* status) {
  const int64_t bags = job.features * job.batch;
  const bool half = job.out_type == OutType::kFloat16 || job.out_type == OutType::kBFloat16;
  if (job.alike == Alike::kNo || job.id_weights != nullptr || job.outside != nullptr ||
      job.widest_shares <= 0 || !half) {
    return false;
  }
  const int64_t widest = few_lanes(job) * (job.weight_type == kInt4 ? 8 : 4);  // columns
  // Those of cuda_few.cuh are for few bags, and those of cuda_express.cuh for rows of one width
  // that fill their threads.
  if (job.one_width || widest <= kWideNarrow ||
      bags * ((few_lanes(job) + 31) / 32) <= kFewMost * multiprocessors) {
    return false;
  }
  const bool bytes = number_bits(job.weight_type) <= 8;
  const int64_t in_pass = bytes ? 2 * kWideSlab : kWideSlab;
  const int64_t passes = (widest + in_pass - 1) / in_pass;
  const int64_t work = bags * passes;
  const int64_t at_once = int64_t{kWideBlocks} * kWideWarps * multiprocessors;
  const int64_t most_ids = !job.one_share_count ? kWideIdsOfMixed
                           : work <= at_once    ? kWideIdsOfFew
                                                : kWideIds;
  if (job.ids > most_ids * bags) return false;
  // A warp's first row takes as long as several others, so that it needs some bags to be worth it.
  if (job.ids == bags) {
    if (widest <= kWideFromOne || work <= kWideFewestOne * at_once) return false;
  } else if (job.ids <= 2 * bags && work <= at_once) {
    return false;
  }
  const WideKernel kernel = wide_for(job);
  if (kernel == nullptr) return false;
  // As few rounds of blocks as warps of 32 bags make, and all of them full; the passes of a wide
  // row are side by side.
  const int64_t full = kWideBags * at_once;
  const int64_t rounds = (work + full - 1) / full;
  int64_t each = (work + rounds * at_once - 1) / (rounds * at_once);
  int64_t apart = passes;
  if (!job.one_share_count) {
    // Many blocks have no pass of a narrower row, and soon leave their places to others; where
    // there are very many, they are not worth that.
    each = std::min(each, kWidePasses / std::max<int64_t>(passes, 2));
    if (work > kWideRounds * each * at_once) apart = 1;
  }
  if (job.ids > 2 * bags) each = std::min(each, kWideIdsOfWarp * bags / job.ids);
  each = std::clamp<int64_t>(each, 1, kWideBags);
  const int64_t in_block = kWideWarps * each;
  const dim3 grid(static_cast<unsigned>((job.batch + in_block - 1) / in_block),
                  static_cast<unsigned>(job.features + (job.dense != nullptr ? 1 : 0)),
                  static_cast<unsigned>(apart));
  kernel<<<grid, kWideThreads, 0, stream>>>(job, static_cast<int>(each));
  *status = cudaGetLastError();
  return true;
}

}  // namespace tessera
