// The dense layer on the CPU: checks every size, then calls the kernel.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu_kernels.h"

namespace tessera {
namespace {

using at::Tensor;

// Under this many multiply-adds another thread costs more than it brings.
constexpr int64_t kProductsPerThread = 1 << 20;
// The kernels' widest vector: a panel is a whole number of them.
constexpr int64_t kPanelStep = 16;

bool is_float(const Tensor& tensor, int64_t dims) {
  return tensor.scalar_type() == at::kFloat && tensor.dim() == dims;
}

Tensor linear(const Tensor& input, const Tensor& weights, const Tensor& bias, int64_t outputs,
              bool relu) {
  TORCH_CHECK(is_float(weights, 3) && weights.is_contiguous() && weights.size(0) >= 1 &&
                  weights.size(1) >= 1 && weights.size(2) >= 1 &&
                  weights.size(2) % kPanelStep == 0,
              "weights: contiguous float32 [panels, inputs, a multiple of ", kPanelStep,
              "] is needed, got ", weights.scalar_type(), " ", weights.sizes());
  const int64_t panel = weights.size(2);
  const int64_t padded = weights.size(0) * panel;
  TORCH_CHECK(is_float(bias, 1) && bias.is_contiguous() && bias.numel() == padded,
              "bias: contiguous float32 [", padded, "] is needed, got ", bias.scalar_type(), " ",
              bias.sizes());
  TORCH_CHECK(outputs > padded - panel && outputs <= padded, "outputs: ", outputs,
              " do not end in the last of ", weights.size(0), " panels of ", panel);
  TORCH_CHECK(is_float(input, 2) && input.size(1) == weights.size(1) &&
                  (input.stride(1) == 1 || input.size(1) == 1),
              "input: a float32 matrix of ", weights.size(1),
              " columns with contiguous rows is needed, got ", input.scalar_type(), " ",
              input.sizes());
  Tensor out = at::empty({input.size(0), outputs}, input.options());
  const LinearJob job{.input = input.const_data_ptr<float>(),
                      .input_stride = input.stride(0),
                      .inputs = input.size(1),
                      .weights = weights.const_data_ptr<float>(),
                      .panel = panel,
                      .bias = bias.const_data_ptr<float>(),
                      .outputs = outputs,
                      .relu = relu,
                      .out = out.mutable_data_ptr<float>()};
  const int64_t rows_per_thread = std::max<int64_t>(1, kProductsPerThread / (padded * job.inputs));
  at::parallel_for(0, input.size(0), rows_per_thread, [&](int64_t begin, int64_t end) {
    cpu_kernels().linear(job, begin, end);
  });
  return out;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("linear", tessera::linear); }
