// Chooses among the kernels of cuda_few.cuh, which are compiled here.
#include "cuda_few.h"

#include "cuda_few.cuh"

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

template <int Step, int Lanes, int64_t T, Scales S>
FewKernel few_of(const CudaLookup& job) {
  if (job.hashed) {
    return job.wide_ids ? lookup_few_kernel<Step, Lanes, T, S, Ids::kHashed, true>
                        : lookup_few_kernel<Step, Lanes, T, S, Ids::kHashed, false>;
  }
  return job.wide_ids ? lookup_few_kernel<Step, Lanes, T, S, Ids::kRows, true>
                      : lookup_few_kernel<Step, Lanes, T, S, Ids::kRows, false>;
}

template <int64_t T, Scales S>
FewKernel few_of(const CudaLookup& job, FewForm form) {
  if (form.lanes == 8) return few_of<kFewStep, 8, T, S>(job);
  if (form.lanes == 16) return few_of<kFewStep, 16, T, S>(job);
  if constexpr (S == Scales::kRow) {
    if (form.step == kFewLongest) return few_of<kFewLongest, 32, T, S>(job);
  }
  return few_of<kFewStep, 32, T, S>(job);
}

template <int64_t T>
FewKernel quantized_of(const CudaLookup& job, FewForm form) {
  return job.alike == Alike::kRowScale ? few_of<T, Scales::kRow>(job, form)
                                       : few_of<T, Scales::kOne>(job, form);
}

// nullptr: a kind that nobody asked for yet.
FewKernel few_for(const CudaLookup& job, FewForm form) {
  if (job.weight_type == kBlockInt8) {
    return job.alike == Alike::kBook ? few_of<kBlockInt8, Scales::kBook>(job, form) : nullptr;
  }
  if (job.alike == Alike::kBook) return nullptr;
  if (job.weight_type == kInt8) return quantized_of<kInt8>(job, form);
  if (job.weight_type == kInt4) return quantized_of<kInt4>(job, form);
  if (job.weight_type == kFloat8) return quantized_of<kFloat8>(job, form);
  if (job.alike != Alike::kOneScale) return nullptr;
  if (job.weight_type == kFloat16) return few_of<kFloat16, Scales::kOne>(job, form);
  if (job.weight_type == kBFloat16) return few_of<kBFloat16, Scales::kOne>(job, form);
  return nullptr;
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
