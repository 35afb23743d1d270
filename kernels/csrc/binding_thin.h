// A thin layer's arguments, which both devices check alike.
#pragma once

#include <ATen/ATen.h>

#include "binding_checks.h"

namespace tessera {

// Returns the result's type.
inline at::ScalarType check_thin(const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& bias, c10::optional<at::ScalarType> dtype,
                                 double scale) {
  constexpr int64_t kThinColumns = 16;
  TORCH_CHECK(weight.scalar_type() == at::kFloat && weight.dim() == 2 && weight.is_contiguous() &&
                  weight.size(0) >= 1 && weight.size(1) >= 1 &&
                  std::min(weight.size(0), weight.size(1)) < kThinColumns &&
                  weight.device() == input.device(),
              "weight: contiguous float32 [outputs, inputs] is needed on ", input.device(),
              " with fewer than ", kThinColumns, " of either, got ", weight.scalar_type(), " ",
              weight.sizes(), " on ", weight.device());
  TORCH_CHECK((input.scalar_type() == at::kFloat || input.scalar_type() == at::kBFloat16) &&
                  input.dim() == 2 && input.size(1) == weight.size(1) &&
                  (input.stride(1) == 1 || input.size(1) == 1),
              "input: a float32 or bfloat16 matrix of ", weight.size(1),
              " columns with contiguous rows is needed, got ", input.scalar_type(), " ",
              input.sizes());
  TORCH_CHECK(bias.scalar_type() == at::kFloat && bias.dim() == 1 &&
                  bias.size(0) == weight.size(0) && bias.is_contiguous() &&
                  bias.device() == input.device(),
              "bias: contiguous float32 [", weight.size(0), "] is needed on ", input.device(),
              ", got ", bias.scalar_type(), " ", bias.sizes(), " on ", bias.device());
  const at::ScalarType type = scaled_scalar_type(dtype, scale);
  TORCH_CHECK(type != at::kHalf, "dtype: float32, bfloat16 or float8_e4m3fn is needed, got Half");
  return type;
}

}  // namespace tessera
