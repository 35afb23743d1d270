// The cross layer's arguments, which both devices check alike.
#pragma once

#include <ATen/ATen.h>

namespace tessera {

inline void check_cross(const at::Tensor& x0, const at::Tensor& x, const at::Tensor& v,
                        const at::Tensor& weight, const at::Tensor& bias) {
  const auto check_rows = [&](const at::Tensor& tensor, const char* name, int64_t columns) {
    TORCH_CHECK(tensor.scalar_type() == at::kBFloat16 && tensor.dim() == 2 &&
                    tensor.size(0) == x0.size(0) && tensor.size(1) == columns &&
                    (tensor.stride(1) == 1 || columns == 1) && tensor.device() == x0.device(),
                name, ": bfloat16 [", x0.size(0), ", ", columns,
                "] with contiguous rows is needed on ", x0.device(), ", got ", tensor.scalar_type(),
                " ", tensor.sizes(), " on ", tensor.device());
  };
  TORCH_CHECK(x0.dim() == 2 && x0.size(1) >= 1,
              "x0: a matrix of one or more columns is needed, got ", x0.sizes());
  const int64_t width = x0.size(1);
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 && weight.dim() == 2 &&
                  weight.size(0) == width && weight.size(1) >= 1 && weight.is_contiguous() &&
                  weight.device() == x0.device(),
              "weight: contiguous bfloat16 [", width, ", inputs] is needed on ", x0.device(),
              ", got ", weight.scalar_type(), " ", weight.sizes(), " on ", weight.device());
  TORCH_CHECK(bias.scalar_type() == at::kBFloat16 && bias.dim() == 1 && bias.size(0) == width &&
                  bias.is_contiguous() && bias.device() == x0.device(),
              "bias: contiguous bfloat16 [", width, "] is needed on ", x0.device(), ", got ",
              bias.scalar_type(), " ", bias.sizes(), " on ", bias.device());
  check_rows(x0, "x0", width);
  check_rows(x, "x", width);
  check_rows(v, "v", weight.size(1));
}

}  // namespace tessera
