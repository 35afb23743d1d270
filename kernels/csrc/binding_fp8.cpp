// Layers of e4m3 numbers on the CPU, by torch's own functions in float32: what packages for GPUs
// are tried with.
#include "binding_fp8.h"

#include <torch/library.h>

namespace tessera {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;

Tensor wide(const Tensor& tensor) { return tensor.to(at::kFloat); }

Tensor linear_fp8(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  const Tensor& scales, bool relu, c10::optional<at::ScalarType> dtype) {
  const Tensor added = bias.value_or(Tensor());
  const at::ScalarType type = check_linear_fp8(input, weight, added, scales, dtype);
  Tensor result =
      at::mm(wide(input), wide(weight).t()).mul_(scale_of(scales, 0)).mul_(scale_of(scales, 1));
  if (added.defined()) result.add_(wide(added));
  if (relu) result.relu_();
  return type == kE4m3 ? to_float8(result) : result.to(type);
}

Tensor cross_layer_fp8(const Tensor& x0, const Tensor& x, const Tensor& v, const Tensor& weight,
                       const Tensor& bias, const Tensor& scales) {
  check_cross_fp8(x0, x, v, weight, bias, scales);
  const Tensor layer = at::mm(wide(v), wide(weight).t()).mul_(scale_of(scales, 0)).add_(wide(bias));
  return to_float8(layer.mul_(wide(x0)).add_(wide(x).mul_(scale_of(scales, 1))));
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("linear_fp8", tessera::linear_fp8);
  m.impl("cross_layer_fp8", tessera::cross_layer_fp8);
}
