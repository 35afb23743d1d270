// Chooses among the kernels of cuda_few.cuh, which are compiled here.
#include "cuda_few.h"

#include "cuda_few.cuh"

namespace tessera {
namespace {

// Warps for each multiprocessor up to which bags are few: as many as it holds at once.
constexpr int64_t kMostShort = 32;
constexpr int64_t kMostLong = 16;

using FewKernel = void (*)(CudaLookup);

template <int Step, int64_t T, Scales S>
FewKernel few_of(const CudaLookup& job) {
  if (job.hashed) {
    return job.wide_ids ? lookup_few_kernel<Step, T, S, Ids::kHashed, true>
                        : lookup_few_kernel<Step, T, S, Ids::kHashed, false>;
  }
  return job.wide_ids ? lookup_few_kernel<Step, T, S, Ids::kRows, true>
                      : lookup_few_kernel<Step, T, S, Ids::kRows, false>;
}

template <int64_t T, Scales S>
FewKernel few_of(const CudaLookup& job) {
  const bool is_short = job.ids <= kFewShort * job.features * job.batch;
  return is_short ? few_of<kFewShort, T, S>(job)
                  : few_of<kFewLong / FewShare<T>::kWords, T, S>(job);
}

template <int64_t T>
FewKernel quantized_of(const CudaLookup& job) {
  return job.alike == Alike::kRowScale ? few_of<T, Scales::kRow>(job)
                                       : few_of<T, Scales::kOne>(job);
}

// nullptr: a kind that nobody asked for yet.
FewKernel few_for(const CudaLookup& job) {
  if (job.weight_type == kBlockInt8) {
    return job.alike == Alike::kBook ? few_of<kBlockInt8, Scales::kBook>(job) : nullptr;
  }
  if (job.alike == Alike::kBook) return nullptr;
  if (job.weight_type == kInt8) return quantized_of<kInt8>(job);
  if (job.weight_type == kInt4) return quantized_of<kInt4>(job);
  if (job.weight_type == kFloat8) return quantized_of<kFloat8>(job);
  if (job.alike != Alike::kOneScale) return nullptr;
  if (job.weight_type == kFloat16) return few_of<kFloat16, Scales::kOne>(job);
  if (job.weight_type == kBFloat16) return few_of<kBFloat16, Scales::kOne>(job);
  return nullptr;
}

// The widest row of the call in lanes of the kernel.
int64_t widest_lanes(const CudaLookup& job) {
  const bool half = job.weight_type == kFloat16 || job.weight_type == kBFloat16;
  const int64_t share = half ? 8 : 16;
  const int64_t part = job.weight_type == kInt4 ? 8 : 4;
  return job.widest_shares * (share / part);
}

}  // namespace

bool launch_few_bags(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                     cudaError_t* status) {
  if (job.alike == Alike::kNo || job.id_weights != nullptr || job.outside != nullptr ||
      job.widest_shares <= 0) {
    return false;
  }
  const int64_t blocks = (widest_lanes(job) + 31) / 32;
  const int64_t bags = job.features * job.batch;
  const int64_t most = (job.ids <= kFewShort * bags ? kMostShort : kMostLong) * multiprocessors;
  if (bags * blocks > most) return false;
  const FewKernel kernel = few_for(job);
  if (kernel == nullptr) return false;
  const dim3 grid(static_cast<unsigned>((job.batch + kFewWarps - 1) / kFewWarps),
                  static_cast<unsigned>(job.features + (job.dense != nullptr ? 1 : 0)),
                  static_cast<unsigned>(blocks));
  kernel<<<grid, kFewThreads, 0, stream>>>(job);
  *status = cudaGetLastError();
  return true;
}

}  // namespace tessera
