// One step from a raw dense value to what a model's layers get: the same on CPUs and GPUs.
#pragma once

#include <cmath>
#include <cstdint>

#include "ids.h"

namespace tessera {

// The kinds of a step: the numbers of `tessera.kernels.dense_steps.Step`.
enum class DenseStep : int64_t { kNone, kFill, kClip, kLog1p, kScale, kKinds };

// One step of one value; NaN stays NaN but for kFill.  `a` and `b` are the step's settings.
TESSERA_HOST_DEVICE float apply_dense_step(DenseStep step, float value, double a, double b) {
  switch (step) {
    case DenseStep::kFill: return value != value ? static_cast<float>(a) : value;
    case DenseStep::kClip: {
      const auto low = static_cast<float>(a);
      const auto high = static_cast<float>(b);
      const float raised = value < low ? low : value;
      return raised > high ? high : raised;
    }
    case DenseStep::kLog1p: {
      // In float64, so that rounding to float32 hides how a library's logarithm rounds.
      const double whole = log1p(fabs(static_cast<double>(value)));
      return copysignf(static_cast<float>(whole), value);
    }
    case DenseStep::kScale: {
      const float moved = value - static_cast<float>(a);
      return moved * static_cast<float>(b);
    }
    case DenseStep::kNone:
    case DenseStep::kKinds: break;
  }
  return value;
}

}  // namespace tessera
