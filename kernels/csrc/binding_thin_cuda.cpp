// Thin layers on a GPU.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "binding_thin.h"
#include "cuda_thin.h"

namespace tessera {
namespace {

using at::Tensor;

Tensor linear_thin(const Tensor& input, const Tensor& weight, const Tensor& bias, bool relu,
                   c10::optional<at::ScalarType> dtype, double scale) {
  const at::ScalarType type = check_thin(input, weight, bias, dtype, scale);
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor out = at::empty({input.size(0), weight.size(0)}, input.options().dtype(type));
  if (out.size(0) == 0) return out;
  CudaThin job{};
  job.input = input.const_data_ptr();
  job.weight = weight.const_data_ptr<float>();
  job.bias = bias.const_data_ptr<float>();
  job.out = out.mutable_data_ptr();
  job.rows = out.size(0);
  job.inputs = weight.size(1);
  job.outputs = weight.size(0);
  job.input_stride = input.stride(0);
  job.narrow_input = input.scalar_type() == at::kBFloat16;
  job.relu = relu;
  job.out_type = out_type_of(type);
  job.scale = static_cast<float>(scale);
  const cudaError_t status = launch_thin(job, c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(status == cudaSuccess,
              "the thin layer's kernel was not launched: ", cudaGetErrorString(status));
  return out;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CUDA, m) { m.impl("linear_thin", tessera::linear_thin); }
