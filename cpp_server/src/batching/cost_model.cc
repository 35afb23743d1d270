#include "batching/cost_model.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

constexpr double kHalfLifePasses = 64;
const double kDecay = std::exp2(-1 / kHalfLifePasses);

}  // namespace

Duration PassCost::of(std::int64_t samples) const {
  const double predicted = fixed_seconds + static_cast<double>(samples) * per_sample_seconds;
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(std::max(predicted, 0.0)));
}

void CostModel::observe(std::int64_t samples, Duration took) {
  const auto n = static_cast<double>(samples);
  const double t = seconds(took);
  weight_ = weight_ * kDecay + 1;
  sum_n_ = sum_n_ * kDecay + n;
  sum_t_ = sum_t_ * kDecay + t;
  sum_nn_ = sum_nn_ * kDecay + n * n;
  sum_nt_ = sum_nt_ * kDecay + n * t;
}

PassCost CostModel::cost() const {
  if (weight_ == 0) return {};
  const double mean_n = sum_n_ / weight_;
  const double mean_t = sum_t_ / weight_;
  const double variance = sum_nn_ / weight_ - mean_n * mean_n;
  // Passes of one size say nothing of the slope; more samples never take less time.
  const double covariance = sum_nt_ / weight_ - mean_n * mean_t;
  const double slope =
      variance > 1e-9 * std::max(mean_n * mean_n, 1.0) ? std::max(covariance / variance, 0.0) : 0.0;
  return {.fixed_seconds = mean_t - slope * mean_n, .per_sample_seconds = slope};
}

}  // namespace tessera
