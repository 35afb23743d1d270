// Thin layers on the CPU, by torch's own functions: what packages for GPUs are tried with.
#include "binding_thin.h"

#include <torch/library.h>

#include "binding_fp8.h"

namespace tessera {
namespace {

using at::Tensor;

Tensor linear_thin(const Tensor& input, const Tensor& weight, const Tensor& bias, bool relu,
                   c10::optional<at::ScalarType> dtype, double scale) {
  const at::ScalarType type = check_thin(input, weight, bias, dtype, scale);
  Tensor result = at::addmm(bias, input.to(at::kFloat), weight.t());
  if (relu) result.relu_();
  return type == kE4m3 ? to_float8(result.mul_(scale)) : result.to(type);
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("linear_thin", tessera::linear_thin); }
