// Steps from raw dense values to what a model's layers get, on the CPU.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "binding_batch.h"
#include "dense_step.h"

namespace tessera {
namespace {

using at::Tensor;

// Under this many values another thread costs more than it brings.
constexpr int64_t kValuesPerThread = 1 << 13;

Tensor dense_steps(const Tensor& values, const Tensor& steps) {
  check_dense_steps(values, steps);
  const int64_t count = steps.size(0);
  const int64_t columns = values.size(1);
  const double* const settings = steps.const_data_ptr<double>();
  for (int64_t i = 0; i < count * columns; ++i) {
    const double kind = settings[3 * i];
    TORCH_CHECK(
        kind >= 0 && kind < static_cast<double>(DenseStep::kKinds) && kind == std::floor(kind),
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
          value = apply_dense_step(static_cast<DenseStep>(static_cast<int64_t>(step[0])), value,
                                   step[1], step[2]);
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
