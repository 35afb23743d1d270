// What training under bfloat16 computes, on a GPU.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "binding_train.h"
#include "cuda_train.h"

namespace tessera {
namespace {

using at::Tensor;

void launched(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "a kernel of training was not launched: ", cudaGetErrorString(status));
}

CudaPairs pairs_of(const Tensor& dense, const Tensor& sparse, int64_t count) {
  CudaPairs job{};
  job.dense = dense.const_data_ptr();
  job.sparse = sparse.const_data_ptr();
  job.batch = dense.size(0);
  job.count = count;
  job.dim = dense.size(1);
  return job;
}

Tensor dot_interaction_bf16(const Tensor& dense, const Tensor& sparse) {
  const int64_t count = check_interaction_bf16(dense, sparse);
  const c10::cuda::CUDAGuard guard(dense.device());
  const Tensor out =
      at::empty({dense.size(0), interaction_columns(dense.size(1), count)}, dense.options());
  if (out.size(0) == 0) return out;
  CudaPairs job = pairs_of(dense, sparse, count);
  job.out = out.mutable_data_ptr();
  launched(launch_pairs(job, c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<Tensor, Tensor> dot_interaction_bf16_backward(const Tensor& grad, const Tensor& dense,
                                                         const Tensor& sparse) {
  const int64_t count = check_interaction_bf16(dense, sparse);
  check_bf16_rows(grad, "grad", dense.size(0), interaction_columns(dense.size(1), count),
                  dense.device());
  const c10::cuda::CUDAGuard guard(dense.device());
  const Tensor dense_grad = at::empty_like(dense);
  const Tensor sparse_grad = at::empty_like(sparse);
  if (dense.size(0) == 0) return {dense_grad, sparse_grad};
  CudaPairs job = pairs_of(dense, sparse, count);
  job.out = const_cast<void*>(grad.const_data_ptr());
  job.dense_grad = dense_grad.mutable_data_ptr();
  job.sparse_grad = sparse_grad.mutable_data_ptr();
  launched(launch_pairs_backward(job, c10::cuda::getCurrentCUDAStream()));
  return {dense_grad, sparse_grad};
}

std::tuple<Tensor, Tensor> relu_backward_bf16(const Tensor& grad, const Tensor& output) {
  check_relu_backward(grad, output);
  const c10::cuda::CUDAGuard guard(output.device());
  const Tensor passed = at::empty_like(grad);
  const auto wide = grad.options().dtype(at::kFloat);
  if (grad.size(0) == 0) return {passed, at::zeros({grad.size(1)}, wide)};
  const Tensor partial =
      at::empty({relu_grad_parts(grad.size(0), grad.size(1)), grad.size(1)}, wide);
  const Tensor sums = at::empty({grad.size(1)}, wide);
  CudaReluGrad job{};
  job.grad = grad.const_data_ptr();
  job.output = output.const_data_ptr();
  job.passed = passed.mutable_data_ptr();
  job.partial = partial.mutable_data_ptr<float>();
  job.sums = sums.mutable_data_ptr<float>();
  job.rows = grad.size(0);
  job.columns = grad.size(1);
  launched(launch_relu_grad(job, c10::cuda::getCurrentCUDAStream()));
  return {passed, sums};
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("dot_interaction_bf16", tessera::dot_interaction_bf16);
  m.impl("dot_interaction_bf16_backward", tessera::dot_interaction_bf16_backward);
  m.impl("relu_backward_bf16", tessera::relu_backward_bf16);
}
