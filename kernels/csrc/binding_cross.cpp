// The cross layer on the CPU, by torch's own functions: what packages for GPUs are tried with.
#include "binding_cross.h"

#include <torch/library.h>

namespace tessera {
namespace {

using at::Tensor;

Tensor cross_layer(const Tensor& x0, const Tensor& x, const Tensor& v, const Tensor& weight,
                   const Tensor& bias) {
  check_cross(x0, x, v, weight, bias);
  const auto wide = [](const Tensor& tensor) { return tensor.to(at::kFloat); };
  const Tensor product = at::addmm(wide(bias), wide(v), wide(weight).t());
  return product.mul_(wide(x0)).add_(wide(x)).to(at::kBFloat16);
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("cross_layer", tessera::cross_layer); }
