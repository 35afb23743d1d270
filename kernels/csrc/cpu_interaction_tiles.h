// One sample's dot products for any `Vec`.
//
// Pairs are computed in tiles of 4 x 4: 16 accumulators take 8 loads for 16 multiply-adds per step
// and are summed together.
#pragma once

#include "cpu_kernels.h"

namespace {

constexpr int64_t kTile = 4;

// The tile's 16 dot products: sums[4 * i + j] = left[i] . right[j].
inline void tile_dots(const float* const (&left)[kTile], const float* const (&right)[kTile],
                      int64_t dim, float* sums) {
  Vec acc[16];
  for (int k = 0; k < 16; ++k) acc[k] = Vec::zero();
  int64_t column = 0;
  for (; column + Vec::kWidth <= dim; column += Vec::kWidth) {
    Vec r[kTile];
    for (int j = 0; j < kTile; ++j) r[j] = Vec::load(right[j] + column);
    for (int i = 0; i < kTile; ++i) {
      const Vec l = Vec::load(left[i] + column);
      for (int j = 0; j < kTile; ++j) acc[4 * i + j] = fma(l, r[j], acc[4 * i + j]);
    }
  }
  sum_each(acc, sums);
  for (; column < dim; ++column) {
    for (int i = 0; i < kTile; ++i) {
      for (int j = 0; j < kTile; ++j) sums[4 * i + j] += left[i][column] * right[j][column];
    }
  }
}

// Where pair (i, j), j < i, of n vectors stands among the pairs.
inline int64_t pair_index(int64_t i, int64_t j, int64_t n, bool upper) {
  if (!upper) return i * (i - 1) / 2 + j;
  return j * (2 * n - j - 1) / 2 + (i - j - 1);
}

// One sample.  vectors[0] is dense; `out` holds dim + n (n - 1) / 2 floats.
inline void interact_by_tiles(const float* dense, const float* sparse, int64_t count, int64_t dim,
                              bool upper, float* out) {
  const int64_t n = count + 1;
  std::memcpy(out, dense, static_cast<size_t>(4 * dim));
  float* pairs = out + dim;
  // Past the last vector a tile repeats it; those products are not stored.
  const auto vector = [&](int64_t k) {
    const int64_t bounded = k < n ? k : n - 1;
    return bounded == 0 ? dense : sparse + (bounded - 1) * dim;
  };
  for (int64_t i0 = 0; i0 < n; i0 += kTile) {
    const float* const left[kTile] = {vector(i0), vector(i0 + 1), vector(i0 + 2), vector(i0 + 3)};
    for (int64_t j0 = 0; j0 <= i0; j0 += kTile) {
      const float* const right[kTile] = {vector(j0), vector(j0 + 1), vector(j0 + 2),
                                         vector(j0 + 3)};
      const bool whole = j0 + kTile <= i0 && i0 + kTile <= n;
      float sums[kTile * kTile];
      // Whole tiles are stored in runs: those of one j in `upper` order, else those of one i.
      whole&& upper ? tile_dots(right, left, dim, sums) : tile_dots(left, right, dim, sums);
      if (whole) {
        for (int64_t k = 0; k < kTile; ++k) {
          const int64_t at =
              upper ? pair_index(i0, j0 + k, n, true) : pair_index(i0 + k, j0, n, false);
          std::memcpy(pairs + at, sums + kTile * k, sizeof(float) * kTile);
        }
        continue;
      }
      for (int64_t i = i0; i < i0 + kTile && i < n; ++i) {
        for (int64_t j = j0; j < j0 + kTile && j < i; ++j) {
          pairs[pair_index(i, j, n, upper)] = sums[kTile * (i - i0) + (j - j0)];
        }
      }
    }
  }
}

}  // namespace
