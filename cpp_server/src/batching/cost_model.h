// How long a forward pass of n samples takes: a * n + b, fitted to the passes seen lately.
//
// Weighted least squares in which a pass loses half of its weight after kHalfLifePasses
// further ones, so that the model follows a machine that becomes busier.
//
// Contract: not thread-safe; its owner guards it.
#pragma once

#include <cstdint>

#include "common/clock.h"

namespace tessera {

class CostModel {
 public:
  void observe(std::int64_t samples, Duration took);

  // Zero before the first observation; never negative.
  Duration predict(std::int64_t samples) const;

 private:
  double weight_ = 0;
  double sum_n_ = 0;
  double sum_t_ = 0;
  double sum_nn_ = 0;
  double sum_nt_ = 0;
};

}  // namespace tessera
