// What training under bfloat16 computes, on the CPU by torch's own functions: what it is tried
// with.
#include "binding_train.h"

#include <torch/library.h>

#include <tuple>

namespace tessera {
namespace {

using at::Tensor;

// All vectors of the samples in float32, [B, count + 1, D].
Tensor wide_vectors(const Tensor& dense, const Tensor& sparse, int64_t count) {
  return at::cat({dense, sparse}, 1).to(at::kFloat).view({-1, count + 1, dense.size(1)});
}

// Rows and columns of the pairs, in their order.
Tensor pair_places(int64_t count) { return at::tril_indices(count + 1, count + 1, -1); }

Tensor dot_interaction_bf16(const Tensor& dense, const Tensor& sparse) {
  const int64_t count = check_interaction_bf16(dense, sparse);
  const Tensor vectors = wide_vectors(dense, sparse, count);
  const Tensor pairs = pair_places(count);
  const Tensor dots = at::bmm(vectors, vectors.transpose(1, 2)).flatten(1);
  const Tensor wanted = dots.index_select(1, pairs[0] * (count + 1) + pairs[1]);
  return at::cat({dense, wanted.to(at::kBFloat16)}, 1);
}

std::tuple<Tensor, Tensor> dot_interaction_bf16_backward(const Tensor& grad, const Tensor& dense,
                                                         const Tensor& sparse) {
  const int64_t count = check_interaction_bf16(dense, sparse);
  const int64_t dim = dense.size(1);
  check_bf16_rows(grad, "grad", dense.size(0), interaction_columns(dim, count), dense.device());
  const Tensor wide = grad.to(at::kFloat);
  const Tensor pairs = pair_places(count);
  Tensor symmetric = at::zeros({dense.size(0), (count + 1) * (count + 1)}, wide.options());
  const Tensor of_pairs = wide.narrow(1, dim, wide.size(1) - dim);
  symmetric.index_copy_(1, pairs[0] * (count + 1) + pairs[1], of_pairs);
  symmetric.index_copy_(1, pairs[1] * (count + 1) + pairs[0], of_pairs);
  const Tensor vectors = wide_vectors(dense, sparse, count);
  Tensor grads = at::bmm(symmetric.view({-1, count + 1, count + 1}), vectors).flatten(1);
  grads.narrow(1, 0, dim).add_(wide.narrow(1, 0, dim));
  const Tensor narrow = grads.to(at::kBFloat16);
  return {narrow.narrow(1, 0, dim).contiguous(), narrow.narrow(1, dim, count * dim).contiguous()};
}

std::tuple<Tensor, Tensor> relu_backward_bf16(const Tensor& grad, const Tensor& output) {
  check_relu_backward(grad, output);
  const Tensor passed = grad.masked_fill(output.le(0), 0);
  return {passed, passed.sum(0, /*keepdim=*/false, at::kFloat)};
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("dot_interaction_bf16", tessera::dot_interaction_bf16);
  m.impl("dot_interaction_bf16_backward", tessera::dot_interaction_bf16_backward);
  m.impl("relu_backward_bf16", tessera::relu_backward_bf16);
}
