// What a batch of training goes through before its lookups, on a GPU, which is not waited for.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "binding_batch.h"
#include "cuda_batch.h"
#include "cuda_offsets.h"

namespace tessera {
namespace {

using at::Tensor;

void launched(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "a kernel of a batch was not launched: ", cudaGetErrorString(status));
}

Tensor rows_of_ids(const Tensor& ids, const Tensor& offsets, const Tensor& rows,
                   const Tensor& rules, const Tensor& outside) {
  CudaIdRows job{};
  job.batch = check_id_rows(ids, offsets, rows, rules, outside);
  const c10::cuda::CUDAGuard guard(ids.device());
  Tensor found = at::empty({ids.numel()}, ids.options().dtype(at::kLong));
  if (ids.numel() == 0) return found;
  job.ids = ids.const_data_ptr();
  job.wide_ids = ids.scalar_type() == at::kLong;
  job.offsets = offsets.const_data_ptr();
  job.wide_offsets = offsets.scalar_type() == at::kLong;
  job.count = ids.numel();
  job.features = rows.numel();
  job.rows = rows.const_data_ptr<int64_t>();
  job.rules = rules.const_data_ptr<int64_t>();
  job.outside = outside.const_data_ptr<int64_t>();
  job.out = found.mutable_data_ptr<int64_t>();
  launched(launch_id_rows(job, c10::cuda::getCurrentCUDAStream()));
  return found;
}

std::tuple<Tensor, Tensor, Tensor> unpack_rows(const Tensor& words, int64_t present, int64_t first,
                                               int64_t features, int64_t count) {
  check_packed_rows(words, present, first, features, count);
  const c10::cuda::CUDAGuard guard(words.device());
  const int64_t bags = features * words.size(0);
  const auto wide = words.options().dtype(at::kLong);
  Tensor lengths = at::empty({bags}, words.options());
  Tensor values = at::empty({count}, wide);
  if (bags == 0) return {lengths, at::zeros({1}, wide), values};
  Tensor offsets = at::empty({bags + 1}, wide);
  const Tensor sums = at::empty({offset_sums(bags)}, wide);
  CudaPackedRows job{};
  job.words = reinterpret_cast<const uint32_t*>(words.const_data_ptr<int32_t>());
  job.batch = words.size(0);
  job.width = words.size(1);
  job.present = present;
  job.first = first;
  job.features = features;
  job.lengths = lengths.mutable_data_ptr<int32_t>();
  job.sums = sums.mutable_data_ptr<int64_t>();
  job.offsets = offsets.mutable_data_ptr<int64_t>();
  job.values = values.mutable_data_ptr<int64_t>();
  job.count = count;
  launched(launch_packed_rows(job, c10::cuda::getCurrentCUDAStream()));
  return {lengths, offsets, values};
}

Tensor dense_steps(const Tensor& values, const Tensor& steps) {
  check_dense_steps(values, steps);
  const c10::cuda::CUDAGuard guard(values.device());
  const int64_t columns = values.size(1);
  const Tensor given = columns == 1 || values.stride(1) == 1 ? values : values.contiguous();
  Tensor result = at::empty({values.size(0), columns}, values.options());
  if (result.numel() == 0) return result;
  CudaDenseSteps job{};
  job.values = given.const_data_ptr<float>();
  job.row_stride = given.stride(0);
  job.rows = given.size(0);
  job.columns = columns;
  job.steps = steps.const_data_ptr<double>();
  job.count = steps.size(0);
  job.out = result.mutable_data_ptr<float>();
  launched(launch_dense_steps(job, c10::cuda::getCurrentCUDAStream()));
  return result;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("rows_of_ids", tessera::rows_of_ids);
  m.impl("unpack_rows", tessera::unpack_rows);
  m.impl("dense_steps", tessera::dense_steps);
}
