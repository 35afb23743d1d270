// Chooses among the kernels of cuda_widths.cuh, which are compiled here.
#include "cuda_widths.h"

#include <algorithm>

#include "cuda_widths.cuh"

namespace tessera {
namespace {

constexpr int64_t kMostBlocks = 0x7fffffff;

constexpr int64_t kNarrowLanes = 2;

using WidthsKernel = void (*)(CudaLookup, int, bool);

template <int64_t T, Scales S>
WidthsKernel widths_of(const CudaLookup& job) {
  if (job.hashed) {
    return job.wide_ids ? lookup_widths_kernel<T, S, Ids::kHashed, true>
                        : lookup_widths_kernel<T, S, Ids::kHashed, false>;
  }
  return job.wide_ids ? lookup_widths_kernel<T, S, Ids::kRows, true>
                      : lookup_widths_kernel<T, S, Ids::kRows, false>;
}

template <int64_t T>
WidthsKernel quantized_of(const CudaLookup& job) {
  return job.alike == Alike::kRowScale ? widths_of<T, Scales::kRow>(job)
                                       : widths_of<T, Scales::kOne>(job);
}

// nullptr: a kind that nobody asked for yet.
WidthsKernel widths_for(const CudaLookup& job) {
  if (job.weight_type == kBlockInt8) {
    return job.alike == Alike::kBook ? widths_of<kBlockInt8, Scales::kBook>(job) : nullptr;
  }
  if (job.alike == Alike::kBook) return nullptr;
  if (job.weight_type == kInt8) return quantized_of<kInt8>(job);
  if (job.weight_type == kInt4) return quantized_of<kInt4>(job);
  if (job.weight_type == kFloat8) return quantized_of<kFloat8>(job);
  if (job.alike != Alike::kOneScale) return nullptr;
  switch (job.weight_type) {
    case kFloat32:
      return widths_of<kFloat32, Scales::kOne>(job);
    case kFloat16:
      return widths_of<kFloat16, Scales::kOne>(job);
    case kBFloat16:
      return widths_of<kBFloat16, Scales::kOne>(job);
    default:
      return nullptr;
  }
}

// What a bag of every feature takes of a block, in kBlockParts; from the widest feature where the
// hint, an old package's, does not tell.
int64_t block_parts(const CudaLookup& job) {
  const int64_t most = job.features * kBlockParts;  // no row takes more than a block
  if (job.block_parts > 0) return std::min(job.block_parts, most);
  return job.features * kBlockParts * std::max<int64_t>(job.lanes, 1) / kExpressThreads;
}

}  // namespace

bool launch_widths(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                   cudaError_t* status) {
  if (job.alike == Alike::kNo || job.id_weights != nullptr || job.outside != nullptr) return false;
  const WidthsKernel kernel = widths_for(job);
  if (kernel == nullptr) return false;
  // As for the kernels of one width: see launch_express().
  const int64_t bags = job.features * job.batch;
  const int64_t resident = static_cast<int64_t>(multiprocessors) * kExpressBlocks;
  const int64_t parts = block_parts(job);
  const int64_t blocks = job.batch * parts / kBlockParts;
  // With a scale for each row of one or two shares, so many copies of 4 bytes are on their way that
  // they crowd the ids out of the first cache: the kernel for any mixture, which has fewer rows in
  // flight and leaves that cache more room, is 4 to 20% faster.
  if (job.alike == Alike::kRowScale && job.lanes <= kNarrowLanes && blocks > resident) return false;
  int bags_per_group = job.ids <= 12 * bags ? kExpressBags : 1;
  while (bags_per_group > 1 && blocks < 2 * resident * bags_per_group) bags_per_group /= 2;
  const bool numbered = !job.one_share_count && job.features <= kMostSearched;
  const int64_t rows = numbered ? 1 : job.features;
  // Blocks go on with further tiles where a wrong hint, or the grid's limit, makes this too few.
  const int64_t columns = std::clamp<int64_t>(
      job.batch * parts / (rows * kBlockParts * bags_per_group) + (numbered ? job.features : 1), 1,
      kMostBlocks);
  const Scales scales = job.alike == Alike::kBook       ? Scales::kBook
                        : job.alike == Alike::kRowScale ? Scales::kRow
                                                        : Scales::kOne;
  const dim3 grid(static_cast<unsigned>(columns),
                  static_cast<unsigned>(rows + (job.dense != nullptr ? 1 : 0)));
  kernel<<<grid, kExpressThreads, express_bytes(scales), stream>>>(job, bags_per_group, numbered);
  *status = cudaGetLastError();
  return true;
}

}  // namespace tessera
