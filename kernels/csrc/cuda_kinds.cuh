// Chooses among kernels that are compiled for features of one kind by what a call says of them.
#pragma once

#include "cuda_express.cuh"

namespace tessera {
namespace {

// What such a kernel is compiled for.
template <int64_t T, Scales S, Ids I, bool Wide>
struct Kind {
  static constexpr int64_t kWeights = T;
  static constexpr Scales kScales = S;
  static constexpr Ids kIds = I;
  static constexpr bool kWide = Wide;  // ids of 64 bits
};

template <class Kernel, int64_t T, Scales S, class Choose>
Kernel kernel_of(const CudaLookup& job, Choose choose) {
  if (job.hashed) {
    return job.wide_ids ? choose(Kind<T, S, Ids::kHashed, true>{})
                        : choose(Kind<T, S, Ids::kHashed, false>{});
  }
  return job.wide_ids ? choose(Kind<T, S, Ids::kRows, true>{})
                      : choose(Kind<T, S, Ids::kRows, false>{});
}

template <class Kernel, int64_t T, class Choose>
Kernel quantized_kernel_of(const CudaLookup& job, Choose choose) {
  return job.alike == Alike::kRowScale ? kernel_of<Kernel, T, Scales::kRow>(job, choose)
                                       : kernel_of<Kernel, T, Scales::kOne>(job, choose);
}

// `choose(kind)`: the kernel for a Kind.  nullptr: a kind that nobody asked for yet.
template <class Kernel, bool WithFloat32 = false, class Choose>
Kernel kernel_for(const CudaLookup& job, Choose choose) {
  if (job.weight_type == kBlockInt8) {
    return job.alike == Alike::kBook ? kernel_of<Kernel, kBlockInt8, Scales::kBook>(job, choose)
                                     : nullptr;
  }
  if (job.alike == Alike::kBook) return nullptr;
  if (job.weight_type == kInt8) return quantized_kernel_of<Kernel, kInt8>(job, choose);
  if (job.weight_type == kInt4) return quantized_kernel_of<Kernel, kInt4>(job, choose);
  if (job.weight_type == kFloat8) return quantized_kernel_of<Kernel, kFloat8>(job, choose);
  if (job.alike != Alike::kOneScale) return nullptr;
  if (job.weight_type == kFloat16) return kernel_of<Kernel, kFloat16, Scales::kOne>(job, choose);
  if (job.weight_type == kBFloat16) return kernel_of<Kernel, kBFloat16, Scales::kOne>(job, choose);
  if constexpr (WithFloat32) {
    if (job.weight_type == kFloat32) return kernel_of<Kernel, kFloat32, Scales::kOne>(job, choose);
  }
  return nullptr;
}

}  // namespace
}  // namespace tessera
