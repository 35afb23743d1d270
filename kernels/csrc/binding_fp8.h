// Layers of e4m3 numbers: their arguments, which both devices check alike, and the type itself.
#pragma once

#include <ATen/ATen.h>

namespace tessera {

constexpr at::ScalarType kE4m3 = at::kFloat8_e4m3fn;

// float32 numbers rounded to e4m3, to nearest with ties to even; beyond the largest, the largest.
inline at::Tensor to_float8(const at::Tensor& numbers) {
  constexpr double kLargest = 448.0;
  return numbers.clamp(-kLargest, kLargest).to(kE4m3);
}

inline void check_float8_rows(const at::Tensor& tensor, const char* name, int64_t rows,
                              int64_t columns, const at::Device& device) {
  TORCH_CHECK(tensor.scalar_type() == kE4m3 && tensor.dim() == 2 && tensor.size(0) == rows &&
                  tensor.size(1) == columns && (tensor.stride(1) == 1 || columns == 1) &&
                  tensor.device() == device,
              name, ": float8_e4m3fn [", rows, ", ", columns,
              "] with contiguous rows is needed on ", device, ", got ", tensor.scalar_type(), " ",
              tensor.sizes(), " on ", tensor.device());
}

// cuBLASLt takes scales that begin on multiples of 16 bytes: the first of every four counts.
constexpr int64_t kScaleStep = 4;

inline at::Tensor scale_of(const at::Tensor& scales, int64_t which) {
  return scales.narrow(0, which * kScaleStep, 1);
}

// Weight [outputs, inputs], bias [outputs] and two scales.
inline void check_float8_layer(const at::Tensor& weight, const at::Tensor& bias, int64_t outputs,
                               const at::Tensor& scales, const at::Device& device) {
  TORCH_CHECK(weight.scalar_type() == kE4m3 && weight.dim() == 2 && weight.size(0) == outputs &&
                  weight.size(0) >= 1 && weight.size(1) >= 1 && weight.is_contiguous() &&
                  weight.device() == device,
              "weight: contiguous float8_e4m3fn [", outputs, ", inputs] is needed on ", device,
              ", got ", weight.scalar_type(), " ", weight.sizes(), " on ", weight.device());
  TORCH_CHECK(!bias.defined() ||
                  (bias.scalar_type() == at::kBFloat16 && bias.dim() == 1 &&
                   bias.size(0) == outputs && bias.is_contiguous() && bias.device() == device),
              "bias: contiguous bfloat16 [", outputs, "] is needed on ", device, ", got ",
              bias.scalar_type(), " ", bias.sizes(), " on ", bias.device());
  TORCH_CHECK(scales.scalar_type() == at::kFloat && scales.dim() == 1 &&
                  scales.size(0) == 2 * kScaleStep && scales.is_contiguous() &&
                  scales.device() == device,
              "scales: contiguous float32 [", 2 * kScaleStep, "] is needed on ", device, ", got ",
              scales.scalar_type(), " ", scales.sizes(), " on ", scales.device());
}

// Returns the result's type.
inline at::ScalarType check_linear_fp8(const at::Tensor& input, const at::Tensor& weight,
                                       const at::Tensor& bias, const at::Tensor& scales,
                                       c10::optional<at::ScalarType> dtype) {
  TORCH_CHECK(input.dim() == 2 && weight.dim() == 2, "input and weight: matrices are needed, got ",
              input.sizes(), " and ", weight.sizes());
  check_float8_layer(weight, bias, weight.size(0), scales, input.device());
  check_float8_rows(input, "input", input.size(0), weight.size(1), input.device());
  const at::ScalarType type = dtype.value_or(kE4m3);
  TORCH_CHECK(type == kE4m3 || type == at::kBFloat16,
              "dtype: float8_e4m3fn or bfloat16 is needed, got ", type);
  return type;
}

inline void check_cross_fp8(const at::Tensor& x0, const at::Tensor& x, const at::Tensor& v,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& scales) {
  TORCH_CHECK(x0.dim() == 2 && x0.size(1) >= 1,
              "x0: a matrix of one or more columns is needed, got ", x0.sizes());
  const int64_t rows = x0.size(0);
  const int64_t width = x0.size(1);
  check_float8_layer(weight, bias, width, scales, x0.device());
  check_float8_rows(x0, "x0", rows, width, x0.device());
  check_float8_rows(x, "x", rows, width, x0.device());
  check_float8_rows(v, "v", rows, weight.size(1), x0.device());
}

}  // namespace tessera
