// Chooses among the kernels of cuda_express.cuh and cuda_small.cuh, which are compiled here.
#include "cuda_express.h"

#include "cuda_express.cuh"
#include "cuda_small.cuh"

namespace tessera {
namespace {

using ExpressKernel = void (*)(CudaLookup, int, bool, Beside);
using SmallKernel = void (*)(CudaLookup);

template <int64_t T, Scales S, Ids I, int Lanes>
ExpressKernel express_of(bool wide) {
  return wide ? lookup_express_kernel<T, S, I, Lanes, true>
              : lookup_express_kernel<T, S, I, Lanes, false>;
}

template <int64_t T, Scales S, Ids I>
ExpressKernel express_of(int64_t lanes, bool wide) {
  switch (lanes) {
    case 4: return express_of<T, S, I, 4>(wide);
    case 8: return express_of<T, S, I, 8>(wide);
    case 16: return express_of<T, S, I, 16>(wide);
    case 32: return express_of<T, S, I, 32>(wide);
    default: return nullptr;
  }
}

template <int64_t T, Scales S>
ExpressKernel express_of(const CudaLookup& job) {
  return job.hashed ? express_of<T, S, Ids::kHashed>(job.lanes, job.wide_ids)
                    : express_of<T, S, Ids::kRows>(job.lanes, job.wide_ids);
}

template <int64_t T, Scales S, Ids I>
SmallKernel small_of(int64_t lanes, bool wide) {
  switch (lanes) {
    case 16:
      return wide ? lookup_small_kernel<T, S, I, 16, true>
                  : lookup_small_kernel<T, S, I, 16, false>;
    case 32:
      return wide ? lookup_small_kernel<T, S, I, 32, true>
                  : lookup_small_kernel<T, S, I, 32, false>;
    default: return nullptr;
  }
}

template <int64_t T, Scales S>
SmallKernel small_of(const CudaLookup& job, int64_t lanes) {
  return job.hashed ? small_of<T, S, Ids::kHashed>(lanes, job.wide_ids)
                    : small_of<T, S, Ids::kRows>(lanes, job.wide_ids);
}

Scales scales_of(Alike alike) {
  if (alike == Alike::kBook) return Scales::kBook;
  return alike == Alike::kRowScale ? Scales::kRow : Scales::kOne;
}

ExpressKernel express_for(const CudaLookup& job) {
  const Scales scales = scales_of(job.alike);
  if (job.weight_type == kBlockInt8 && scales == Scales::kBook) {
    return express_of<kBlockInt8, Scales::kBook>(job);
  }
  if (job.weight_type == kInt8 && scales != Scales::kBook) {
    return scales == Scales::kRow ? express_of<kInt8, Scales::kRow>(job)
                                  : express_of<kInt8, Scales::kOne>(job);
  }
  if (job.weight_type == kInt4 && scales == Scales::kRow) {
    return express_of<kInt4, Scales::kRow>(job);
  }
  if (job.weight_type == kFloat16 && scales == Scales::kOne) {
    return express_of<kFloat16, Scales::kOne>(job);
  }
  return nullptr;
}

// `lanes`: of a bag, four columns each.
SmallKernel small_for(const CudaLookup& job, int64_t lanes) {
  const Scales scales = scales_of(job.alike);
  if (job.weight_type == kBlockInt8 && scales == Scales::kBook) {
    return small_of<kBlockInt8, Scales::kBook>(job, lanes);
  }
  if (job.weight_type == kInt8 && scales != Scales::kBook) {
    return scales == Scales::kRow ? small_of<kInt8, Scales::kRow>(job, lanes)
                                  : small_of<kInt8, Scales::kOne>(job, lanes);
  }
  return nullptr;
}

// Whether rows have one width and nothing is asked that these kernels cannot do.
bool alike_rows(const CudaLookup& job) {
  return job.one_width && job.alike != Alike::kNo && job.id_weights == nullptr &&
         job.outside == nullptr;
}

dim3 grid_of(const CudaLookup& job, int64_t bags_per_block) {
  return dim3(static_cast<unsigned>((job.batch + bags_per_block - 1) / bags_per_block),
              static_cast<unsigned>(job.features + (job.dense != nullptr ? 1 : 0)));
}

}  // namespace

bool launch_small(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                  cudaError_t* status) {
  const int64_t bags = job.features * job.batch;
  // A bag of one or two ids ends early with eight threads as well.
  if (!alike_rows(job) || job.ids <= 2 * bags) return false;
  const int64_t lanes = 4 * job.lanes;
  constexpr int64_t kThreadsAtOnce = 2048;
  const SmallKernel small = small_for(job, lanes);
  if (small == nullptr || bags * lanes > kSmallRounds * kThreadsAtOnce * multiprocessors) {
    return false;
  }
  small<<<grid_of(job, kSmallThreads / lanes), kSmallThreads,
          small_bytes(scales_of(job.alike), static_cast<int>(lanes)), stream>>>(job);
  *status = cudaGetLastError();
  return true;
}

bool launch_express(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                    cudaError_t* status) {
  const ExpressKernel express = alike_rows(job) ? express_for(job) : nullptr;
  if (express == nullptr) return false;
  // Groups with several bags keep their rings full across the ends of short ones, and long bags in
  // fewer blocks leave room beside them for features that the cache serves.  Where all bags are
  // long, or there is little work, one bag a group spreads it best.
  const int64_t bags = job.features * job.batch;
  const int64_t resident = static_cast<int64_t>(multiprocessors) * kExpressBlocks * kExpressThreads;
  int bags_per_group = job.ids <= kLongBags * bags ? kExpressBags : 1;
  while (bags_per_group > 1 && bags * job.lanes < 2 * resident * bags_per_group) {
    bags_per_group /= 2;
  }
  const dim3 grid = grid_of(job, kExpressThreads / job.lanes * bags_per_group);
  // Where all blocks begin at once, no order is sooner done than another, and asking for it takes
  // half a microsecond.
  const int64_t threads = int64_t{grid.x} * grid.y * kExpressThreads;
  const bool at_once = threads <= resident;
  express<<<grid, kExpressThreads, ring_bytes<ExpressPipe>(scales_of(job.alike)), stream>>>(
      job, bags_per_group, !at_once, beside_of(job, bags_per_group, threads, resident));
  *status = cudaGetLastError();
  return true;
}

}  // namespace tessera
