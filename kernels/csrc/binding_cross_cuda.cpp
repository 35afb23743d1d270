// The cross layer on a GPU: one kernel where there is one for the device and the sizes, otherwise
// torch's product and a kernel for the rest.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "binding_cross.h"
#include "cuda_cross.h"

namespace tessera {
namespace {

using at::Tensor;

void launched(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "the cross kernel was not launched: ", cudaGetErrorString(status));
}

Tensor cross_layer(const Tensor& x0, const Tensor& x, const Tensor& v, const Tensor& weight,
                   const Tensor& bias) {
  check_cross(x0, x, v, weight, bias);
  const c10::cuda::CUDAGuard guard(x0.device());
  const Tensor out = at::empty({x0.size(0), x0.size(1)}, x0.options());
  if (out.size(0) == 0) return out;
  CudaCross job{};
  job.x0 = x0.const_data_ptr();
  job.x = x.const_data_ptr();
  job.v = v.const_data_ptr();
  job.weight = weight.const_data_ptr();
  job.bias = bias.const_data_ptr();
  job.out = out.mutable_data_ptr();
  job.rows = out.size(0);
  job.width = out.size(1);
  job.inner = weight.size(1);
  job.x0_stride = x0.stride(0);
  job.x_stride = x.stride(0);
  job.v_stride = v.stride(0);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  cudaError_t status = cudaSuccess;
  if (launch_cross(job, x0.device().index(), stream, &status)) {
    launched(status);
    return out;
  }
  const Tensor product = at::addmm(bias, v, weight.t());
  job.v = product.const_data_ptr();
  job.v_stride = product.stride(0);
  launched(launch_cross_elements(job, stream));
  return out;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CUDA, m) { m.impl("cross_layer", tessera::cross_layer); }
