// The dense layers on the CPU: check every size, then call the kernels.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

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

// A matrix whose rows are contiguous.
bool is_rows(const Tensor& tensor) {
  return is_float(tensor, 2) && (tensor.stride(1) == 1 || tensor.size(1) == 1);
}

void check_bias(const Tensor& bias, int64_t padded) {
  TORCH_CHECK(is_float(bias, 1) && bias.is_contiguous() && bias.numel() == padded,
              "bias: contiguous float32 [", padded, "] is needed, got ", bias.scalar_type(), " ",
              bias.sizes());
}

// Memory of this thread, 64-byte aligned, until the next call; it stays with the thread.
float* scratch(int64_t floats) {
  thread_local std::vector<float> memory;
  constexpr size_t kLine = 16;  // floats
  if (memory.size() < static_cast<size_t>(floats) + kLine) {
    memory.assign(static_cast<size_t>(floats) + kLine, 0.0f);
  }
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + ((64 - at % 64) % 64) / sizeof(float);
}

Tensor linear(const Tensor& input, const Tensor& weights, const Tensor& bias, int64_t outputs,
              bool relu) {
  TORCH_CHECK(is_float(weights, 3) && weights.is_contiguous() && weights.size(0) >= 1 &&
                  weights.size(1) >= 1 && weights.size(2) >= 1 && weights.size(2) % kPanelStep == 0,
              "weights: contiguous float32 [panels, inputs, a multiple of ", kPanelStep,
              "] is needed, got ", weights.scalar_type(), " ", weights.sizes());
  const int64_t panel = weights.size(2);
  const int64_t padded = weights.size(0) * panel;
  check_bias(bias, padded);
  TORCH_CHECK(outputs > padded - panel && outputs <= padded, "outputs: ", outputs,
              " do not end in the last of ", weights.size(0), " panels of ", panel);
  TORCH_CHECK(is_rows(input) && input.size(1) == weights.size(1), "input: a float32 matrix of ",
              weights.size(1), " columns with contiguous rows is needed, got ", input.scalar_type(),
              " ", input.sizes());
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
  at::parallel_for(0, input.size(0), rows_per_thread,
                   [&](int64_t begin, int64_t end) { cpu_kernels().linear(job, begin, end); });
  return out;
}

Tensor linear_bf16(const Tensor& input, const Tensor& weights, const Tensor& bias, int64_t outputs,
                   bool relu) {
  TORCH_CHECK(weights.scalar_type() == at::kBFloat16 && weights.dim() == 4 &&
                  weights.is_contiguous() && weights.size(0) >= 1 && weights.size(1) >= 1 &&
                  weights.size(2) == kBf16Inputs / 2 && weights.size(3) == 2 * kBf16Outputs,
              "weights: contiguous bfloat16 [groups, blocks, ", kBf16Inputs / 2, ", ",
              2 * kBf16Outputs, "] is needed, got ", weights.scalar_type(), " ", weights.sizes());
  const int64_t padded = weights.size(0) * kBf16Outputs;
  check_bias(bias, padded);
  TORCH_CHECK(outputs > padded - kBf16Outputs && outputs <= padded, "outputs: ", outputs,
              " do not end in the last of ", weights.size(0), " groups of ", kBf16Outputs);
  const int64_t blocks = weights.size(1);
  TORCH_CHECK(
      is_rows(input) && (input.size(1) + kBf16Inputs - 1) / kBf16Inputs == blocks,
      "input: a float32 matrix of contiguous rows is needed, whose columns end in the last of ",
      blocks, " blocks of ", kBf16Inputs, ", got ", input.scalar_type(), " ", input.sizes());
  Tensor out = at::empty({input.size(0), outputs}, input.options());
  const LinearBf16Job job{
      .input = input.const_data_ptr<float>(),
      .input_stride = input.stride(0),
      .inputs = input.size(1),
      .weights = reinterpret_cast<const uint16_t*>(weights.const_data_ptr<at::BFloat16>()),
      .blocks = blocks,
      .bias = bias.const_data_ptr<float>(),
      .outputs = outputs,
      .relu = relu,
      .out = out.mutable_data_ptr<float>()};
  const int64_t products = padded * blocks * kBf16Inputs;
  const int64_t rows_per_thread = std::max<int64_t>(1, kProductsPerThread / products);
  at::parallel_for(0, input.size(0), rows_per_thread, [&](int64_t begin, int64_t end) {
    const int64_t rows = std::min(kBf16RowsTogether, (end - begin + 15) / 16 * 16);
    cpu_kernels().linear_bf16(job, begin, end, scratch(rows * blocks * kBf16Inputs));
  });
  return out;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("linear", tessera::linear);
  m.impl("linear_bf16", tessera::linear_bf16);
}
