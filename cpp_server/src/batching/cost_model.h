// What a forward pass of n samples costs, in time or in a CPU's: a * n + b, fitted to the passes
// seen lately.
//
// Weighted least squares in which a pass loses half of its weight after kHalfLifePasses
// further ones, so that the model follows a machine that becomes busier.
//
// Contract: not thread-safe; its owner guards it.
#pragma once

#include <cstdint>

#include "common/clock.h"

namespace tessera {

struct PassCost {
  double fixed_seconds = 0;       // b: below zero where the fit says so
  double per_sample_seconds = 0;  // a: never below zero

  // How long a pass of `samples` samples takes; never below zero.
  Duration of(std::int64_t samples) const;
};

class CostModel {
 public:
  void observe(std::int64_t samples, Duration took);

  // Zero before the first observation.
  PassCost cost() const;

 private:
  double weight_ = 0;
  double sum_n_ = 0;
  double sum_t_ = 0;
  double sum_nn_ = 0;
  double sum_nt_ = 0;
};

}  // namespace tessera
