// Chooses among the kernels of cuda_short.cuh, which are compiled here.
#include "cuda_short.h"

#include <algorithm>

#include "cuda_kinds.cuh"
#include "cuda_short.cuh"

namespace tessera {
namespace {

// Four bags have at most so many ids on average.
constexpr int64_t kMostIdsOfFour = 5;
// Bags of one id for each multiprocessor up to which other kernels are faster, for bytes of one
// width.
constexpr int64_t kFewestOfOneWidth = 64;
// Columns of the widest row from which on lanes exchange halves of results.
constexpr int64_t kFewestBetween = 48;
// Warps that a multiprocessor holds at once, and that keep it busy where each has several bags.
constexpr int64_t kWarpsAtOnce = 32;
constexpr int64_t kWarpsEnough = 8;
// How often blocks may fill the machine where their number is rounded to what fills it, and up to
// how many rows side by side: a warp needs many bags of narrower ones.
constexpr int64_t kRoundedRounds = 3;
constexpr int64_t kRoundedSideBySide = 8;

using ShortKernel = void (*)(CudaLookup, int, bool);

ShortKernel short_for(const CudaLookup& job) {
  return kernel_for<ShortKernel>(job, [&](auto kind) -> ShortKernel {
    using K = decltype(kind);
    // Rows of 16 bits gain nothing by it.
    if constexpr (number_bits(K::kWeights) <= 8) {
      if (job.uneven_columns &&
          few_lanes(job) * FewShare<K::kWeights>::kColumns >= kFewestBetween) {
        return lookup_short_kernel<K::kWeights, K::kScales, K::kIds, K::kWide, true>;
      }
    }
    return lookup_short_kernel<K::kWeights, K::kScales, K::kIds, K::kWide, false>;
  });
}

}  // namespace

bool launch_short_bags(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                       cudaError_t* status) {
  const int64_t bags = job.features * job.batch;
  const bool half = job.out_type == OutType::kFloat16 || job.out_type == OutType::kBFloat16;
  if (job.alike == Alike::kNo || job.id_weights != nullptr || job.outside != nullptr ||
      job.widest_shares <= 0 || !half || 4 * job.ids > kMostIdsOfFour * bags) {
    return false;
  }
  const int64_t widest = few_lanes(job);
  const int64_t in_slab = job.weight_type == kInt4 ? 32 : 64;
  const int64_t slabs = (widest + in_slab - 1) / in_slab;
  if (job.ids == bags) {
    // The kernels of one width are as fast at these.
    const bool bytes = job.weight_type != kFloat16 && job.weight_type != kBFloat16;
    if (job.one_width && bytes && bags <= kFewestOfOneWidth * multiprocessors) return false;
  } else if (slabs > 1) {
    return false;
  }
  const ShortKernel kernel = short_for(job);
  if (kernel == nullptr) return false;
  const int64_t at_once = kWarpsAtOnce * multiprocessors;
  // Slabs of wide rows go to warps of their own where bags are few; elsewhere a warp has so few
  // bags that the slabs of a row are read soon after each other, and that it is done about as soon
  // as one of narrow rows.
  const int64_t apart = bags * slabs <= 8 * at_once ? slabs : 1;
  const int64_t side_by_side = in_slab / std::min<int64_t>(widest, in_slab);
  // Bags of one step cost no further wait for memory; more of them where that takes no warps from
  // a multiprocessor.
  const int64_t enough = kWarpsEnough * multiprocessors;
  const auto bags_of_warp = [&](int64_t steps) {
    const int64_t in_step = std::min<int64_t>(kShortBags, side_by_side * steps);
    const int64_t spread = std::clamp((bags * apart + enough - 1) / enough, side_by_side, in_step);
    return std::max(spread, std::min(kShortBags * apart / slabs, bags * apart / at_once));
  };
  int64_t each = bags_of_warp(kShortSteps);
  const int64_t resident = int64_t{kShortBlocks} * multiprocessors;
  const auto rounds_of = [&](int64_t bags_per_warp) {
    const int64_t in_block = kShortWarps * bags_per_warp;
    const int64_t blocks = (job.batch + in_block - 1) / in_block * job.features * apart;
    return (blocks + resident - 1) / resident;
  };
  // Rows of 16 bits have so many words that a lane reads half as many of them together.
  if (number_bits(job.weight_type) > 8) {
    const int64_t fewer = bags_of_warp(kShortSteps / 2);
    if (rounds_of(fewer) <= rounds_of(each)) each = fewer;
  }
  // A few blocks behind the last full round would take as long as one: an eighth more bags a warp
  // may spare them.  Else warps of such a round share the bags of all.
  int64_t rounds = rounds_of(each);
  if (rounds > 1 && rounds <= kRoundedRounds) {
    const int64_t most = std::min<int64_t>(kShortBags, each + each / 8);
    int64_t more = each;
    while (more < most && rounds_of(more) == rounds) ++more;
    if (rounds_of(more) < rounds) {
      each = more;
      --rounds;
    }
    if (rounds > 1 && side_by_side <= kRoundedSideBySide) {
      while (each > 1 && rounds_of(each - 1) == rounds) --each;
    }
  }
  // Blocks of wide rows take longer, and must not be the last to begin.
  const bool widest_first = rounds > 1 && rounds <= kRoundedRounds && job.wide_last;
  const int64_t in_block = kShortWarps * each;
  const dim3 grid(static_cast<unsigned>((job.batch + in_block - 1) / in_block),
                  static_cast<unsigned>(job.features + (job.dense != nullptr ? 1 : 0)),
                  static_cast<unsigned>(apart));
  kernel<<<grid, kShortThreads, 0, stream>>>(job, static_cast<int>(each), widest_first);
  *status = cudaGetLastError();
  return true;
}

}  // namespace tessera
