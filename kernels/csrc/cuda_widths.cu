// Chooses among the kernels of cuda_widths.cuh, which are compiled here.
#include "cuda_widths.h"

#include <algorithm>

#include "cuda_kinds.cuh"
#include "cuda_widths.cuh"

namespace tessera {
namespace {

constexpr int64_t kMostBlocks = 0x7fffffff;
// A call is deep when its bags hold more ids than this on average and would not fill the machine
// more often than this.
constexpr int64_t kDeepIds = 4;
constexpr int64_t kDeepRounds = 2;
// The same rounds for columns of one byte and long bags.
constexpr int64_t kDeepLongRounds = 4;

// From so many shares on a thread reads two of an int4 row at once: 16 bytes, as of other rows.
constexpr int64_t kWideInt4Shares = 8;

using WidthsKernel = void (*)(CudaLookup, Tiling);

template <class P>
WidthsKernel widths_for(const CudaLookup& job) {
  return kernel_for<WidthsKernel, true>(job, [](auto kind) -> WidthsKernel {
    using K = decltype(kind);
    if constexpr (P::kInt4Shares > 1 && K::kWeights != kInt4) {
      return nullptr;
    } else {
      return lookup_widths_kernel<P, K::kWeights, K::kScales, K::kIds, K::kWide>;
    }
  });
}

// `blocks`: that a bag per group takes, of all features.
template <class P>
bool launch(const CudaLookup& job, int multiprocessors, int64_t blocks, int bags_per_group,
            cudaStream_t stream, cudaError_t* status) {
  const WidthsKernel kernel = widths_for<P>(job);
  if (kernel == nullptr) return false;
  // Tiles of the widest feature, as many for every feature.
  const int64_t parts = (job.widest_shares + P::kInt4Shares - 1) / P::kInt4Shares;
  const int64_t widest = std::clamp<int64_t>(parts, 1, P::kThreads);
  const int64_t bags = P::kThreads / widest * bags_per_group;
  const int64_t tiles = (job.batch + bags - 1) / bags;
  const int64_t resident = static_cast<int64_t>(multiprocessors) * P::kBlocks;
  const bool numbered =
      !job.one_share_count && job.features <= kMostSearched && tiles * job.features > resident;
  // Blocks go on with further tiles where a wrong hint, or the grid's limit, makes these too few.
  const int64_t columns = numbered ? blocks / bags_per_group + job.features
                          : job.one_share_count || tiles * job.features <= resident
                              ? tiles
                              : blocks / (bags_per_group * job.features) + 1;
  const Scales scales = job.alike == Alike::kBook       ? Scales::kBook
                        : job.alike == Alike::kRowScale ? Scales::kRow
                                                        : Scales::kOne;
  const int64_t features = (numbered ? 1 : job.features) + (job.dense != nullptr ? 1 : 0);
  const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(columns, 1, kMostBlocks)),
                  static_cast<unsigned>(features));
  // Where all blocks begin at once, no order is sooner done than another.
  const bool ordered = int64_t{grid.x} * grid.y > resident;
  const Beside beside = P::kThreads == kOrderThreads
                            ? beside_of(job, bags_per_group, int64_t{grid.x} * grid.y, resident)
                            : Beside::kAsTheyCome;
  kernel<<<grid, P::kThreads, ring_bytes<P>(scales), stream>>>(
      job, Tiling{bags_per_group, numbered, ordered, beside});
  *status = cudaGetLastError();
  return true;
}

}  // namespace

bool launch_widths(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                   cudaError_t* status) {
  if (job.alike == Alike::kNo || job.id_weights != nullptr || job.outside != nullptr) return false;
  const int64_t bags = job.features * job.batch;
  // A package from before the hint told of widths says how many threads the widest row takes, but
  // not above 32.
  const int64_t most = job.features * kBlockParts;
  const int64_t parts = job.block_parts > 0
                            ? std::min(job.block_parts, most)
                            : most * std::max<int64_t>(job.widest_shares, 1) / WidePipe::kThreads;
  const int64_t blocks = job.batch * parts / kBlockParts;
  constexpr int64_t kRatio = WidePipe::kThreads / DeepPipe::kThreads;
  const bool bytes =
      job.weight_type == kInt8 || job.weight_type == kBlockInt8 || job.weight_type == kFloat8;
  const int64_t rounds = bytes && job.ids > kLongBags * bags ? kDeepLongRounds : kDeepRounds;
  if (job.ids > kDeepIds * bags &&
      blocks * kRatio <= rounds * DeepPipe::kBlocks * multiprocessors) {
    // Smaller blocks hold fewer whole groups: at most half of their threads are idle.
    return launch<DeepPipe>(job, multiprocessors, 2 * kRatio * blocks, 1, stream, status);
  }
  // As for the kernels of one width: see launch_express().
  const int64_t resident = static_cast<int64_t>(multiprocessors) * WidePipe::kBlocks;
  int bags_per_group = job.ids <= 2 * bags ? kWidthsBags : job.ids <= kLongBags * bags ? 4 : 1;
  while (bags_per_group > 1 && 4 * blocks < 5 * resident * bags_per_group) bags_per_group /= 2;
  if (job.weight_type == kInt4 && job.widest_shares >= kWideInt4Shares) {
    const int64_t half = blocks / WideInt4Pipe::kInt4Shares + job.features;
    return launch<WideInt4Pipe>(job, multiprocessors, half, bags_per_group, stream, status);
  }
  return launch<WidePipe>(job, multiprocessors, blocks, bags_per_group, stream, status);
}

}  // namespace tessera
