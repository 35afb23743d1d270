// Chooses among the kernels of cuda_few.cuh, which are compiled here.
#include "cuda_few.h"

#include "cuda_few.cuh"
#include "cuda_kinds.cuh"

namespace tessera {
namespace {

// Lanes of a row that lies in one sector with its scale.
constexpr int64_t kSectorLanes = 8;
// Threads that read a row in the kernels of one width, at least.
constexpr int64_t kOneWidthLanes = 4;

using FewKernel = void (*)(CudaLookup, bool);

// What kernel to take.
struct FewForm {
  int lanes;  // of a bag
  int step;   // rows that are asked for together
};

FewKernel few_for(const CudaLookup& job, FewForm form) {
  return kernel_for<FewKernel>(job, [&](auto kind) -> FewKernel {
    using K = decltype(kind);
    constexpr int64_t T = K::kWeights;
    constexpr Scales S = K::kScales;
    constexpr Ids I = K::kIds;
    if (form.lanes == 8) return lookup_few_kernel<kFewStep, 8, T, S, I, K::kWide>;
    if (form.lanes == 16) return lookup_few_kernel<kFewStep, 16, T, S, I, K::kWide>;
    if constexpr (S == Scales::kRow) {
      if (form.step == kFewLongest) return lookup_few_kernel<kFewLongest, 32, T, S, I, K::kWide>;
    }
    return lookup_few_kernel<kFewStep, 32, T, S, I, K::kWide>;
  });
}

}  // namespace

bool launch_few_bags(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                     cudaError_t* status) {
  if (job.alike == Alike::kNo || job.id_weights != nullptr || job.outside != nullptr ||
      job.widest_shares <= 0) {
    return false;
  }
  const int64_t widest = few_lanes(job);
  const int64_t blocks = (widest + 31) / 32;
  const int64_t bags = job.features * job.batch;
  const int64_t most = kFewMost * multiprocessors;
  FewForm form{32, kFewStep};
  // Where a row is a sector with its scale, the scales' loads bring the rows along.
  if (job.alike == Alike::kRowScale && widest <= kSectorLanes) form.step = kFewLongest;
  int64_t rounds = 1;
  if (bags * blocks > most) {
    const bool bytes = job.weight_type != kFloat16 && job.weight_type != kBFloat16;
    // int4 rows of one share have columns for too few lanes.
    const bool narrow =
        bytes && widest <= kSectorLanes && (job.weight_type != kInt4 || job.widest_shares > 1);
    // Rows of one width, whole shares wide, have kernels of their own, but for the narrowest.
    if (job.one_width && (!narrow || job.lanes >= kOneWidthLanes)) return false;
    form = FewForm{few_bag_lanes(widest), kFewStep};
    if (narrow) rounds = kFewRounds;
  }
  const int64_t at_once = most * (32 / form.lanes);
  if (bags * blocks > rounds * at_once) return false;
  const FewKernel kernel = few_for(job, form);
  if (kernel == nullptr) return false;
  const int64_t in_block = kFewWarps * (32 / form.lanes);
  const dim3 grid(static_cast<unsigned>((job.batch + in_block - 1) / in_block),
                  static_cast<unsigned>(job.features + (job.dense != nullptr ? 1 : 0)),
                  static_cast<unsigned>(blocks));
  kernel<<<grid, kFewThreads, 0, stream>>>(job, bags * blocks > at_once);
  *status = cudaGetLastError();
  return true;
}

}  // namespace tessera
