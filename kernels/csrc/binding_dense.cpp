// Steps from raw dense values to what a model's layers get, on the CPU.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tessera {
namespace {

using at::Tensor;

// Under this many values another thread costs more than it brings.
constexpr int64_t kValuesPerThread = 1 << 13;

// The kinds of a step: the numbers of `tessera.kernels.dense_steps.Step`.
enum class Step : int64_t { kNone, kFill, kClip, kLog1p, kScale, kKinds };

// One step of one value; NaN stays NaN but for kFill.  `a` and `b` are the step's settings.
float apply(Step step, float value, double a, double b) {
  switch (step) {
    case Step::kFill: return std::isnan(value) ? static_cast<float>(a) : value;
    case Step::kClip: {
      const auto low = static_cast<float>(a);
      const auto high = static_cast<float>(b);
      const float raised = value < low ? low : value;
      return raised > high ? high : raised;
    }
    case Step::kLog1p: {
      // In float64, so that rounding to float32 hides how a library's logarithm rounds.
      const double whole = std::log1p(std::fabs(static_cast<double>(value)));
      return std::copysign(static_cast<float>(whole), value);
    }
    case Step::kScale: return (value - static_cast<float>(a)) * static_cast<float>(b);
    default: return value;
  }
}

Tensor dense_steps(const Tensor& values, const Tensor& steps) {
  TORCH_CHECK(values.scalar_type() == at::kFloat && values.dim() == 2,
              "values: a float32 matrix is needed, got ", values.scalar_type(), " ",
              values.sizes());
  TORCH_CHECK(steps.scalar_type() == at::kDouble && steps.dim() == 3 && steps.is_contiguous() &&
                  steps.size(1) == values.size(1) && steps.size(2) == 3,
              "steps: contiguous float64 [steps, ", values.size(1), ", 3] is needed, got ",
              steps.scalar_type(), " ", steps.sizes());
  const int64_t count = steps.size(0);
  const int64_t columns = values.size(1);
  const double* const settings = steps.const_data_ptr<double>();
  for (int64_t i = 0; i < count * columns; ++i) {
    const double kind = settings[3 * i];
    TORCH_CHECK(kind >= 0 && kind < static_cast<double>(Step::kKinds) && kind == std::floor(kind),
                "steps: entry ", i, " has the unknown kind ", kind);
  }
  const Tensor rows = values.contiguous();
  Tensor result = at::empty_like(rows);
  const float* const in = rows.const_data_ptr<float>();
  float* const out = result.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kValuesPerThread / std::max<int64_t>(1, columns));
  at::parallel_for(0, rows.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * columns; at < end * columns; at += columns) {
      for (int64_t column = 0; column < columns; ++column) {
        float value = in[at + column];
        const double* step = settings + 3 * column;
        for (int64_t i = 0; i < count; ++i, step += 3 * columns) {
          value = apply(static_cast<Step>(static_cast<int64_t>(step[0])), value, step[1], step[2]);
        }
        out[at + column] = value;
      }
    }
  });
  return result;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("dense_steps", tessera::dense_steps); }
