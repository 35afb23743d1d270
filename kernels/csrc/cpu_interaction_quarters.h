// One sample's dot products with AVX-512, with fewer sums across a register.
//
// Four vectors are packed side by side: the quarters of a register hold four columns of each. Times
// four columns of a fifth vector, repeated in every quarter, they add up to four dot products, of
// which each has four elements left to be summed in the end where a register per product would
// have 16.  With 512-bit registers all arithmetic and all shuffles share two ports, so instructions
// are what counts (NOTES.md).
#pragma once

#include "cpu_interaction_tiles.h"

namespace {

constexpr int64_t kColumns = 4;  // of a quarter
// Packed floats on the stack: 64 KiB.
constexpr int64_t kMostPacked = 1 << 14;

inline int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// packed[16 * c + 4 * q + k] = vectors[q][4 * c + k]; columns past `dim` are zeros.
inline void pack_group(const float* const (&vectors)[kTile], int64_t dim, float* packed) {
  for (int64_t column = 0; column < dim; column += Vec::kWidth, packed += kTile * Vec::kWidth) {
    const auto whole =
        static_cast<__mmask16>(dim - column >= Vec::kWidth ? 0xffff : (1 << (dim - column)) - 1);
    __m512 row[kTile];
    for (int q = 0; q < kTile; ++q) row[q] = _mm512_maskz_loadu_ps(whole, vectors[q] + column);
    const __m512 low01 = _mm512_shuffle_f32x4(row[0], row[1], 0x44);
    const __m512 low23 = _mm512_shuffle_f32x4(row[2], row[3], 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(row[0], row[1], 0xee);
    const __m512 high23 = _mm512_shuffle_f32x4(row[2], row[3], 0xee);
    _mm512_storeu_ps(packed, _mm512_shuffle_f32x4(low01, low23, 0x88));
    _mm512_storeu_ps(packed + 16, _mm512_shuffle_f32x4(low01, low23, 0xdd));
    _mm512_storeu_ps(packed + 32, _mm512_shuffle_f32x4(high01, high23, 0x88));
    _mm512_storeu_ps(packed + 48, _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
}

// Element 4 * q + k of sums[g] = singles[k] . the q-th vector of packed group g.
template <int Groups>
inline void quarter_dots(const float* const (&singles)[kTile], const float* packed,
                         int64_t group_floats, int64_t dim, __m512* sums) {
  Vec acc[Groups][kTile];
  for (int g = 0; g < Groups; ++g) {
    for (int k = 0; k < kTile; ++k) acc[g][k] = Vec::zero();
  }
  for (int64_t column = 0; column < dim; column += kColumns, packed += Vec::kWidth) {
    Vec group[Groups];
    for (int g = 0; g < Groups; ++g) group[g] = Vec::load(packed + g * group_floats);
    for (int k = 0; k < kTile; ++k) {
      const Vec single = {_mm512_broadcast_f32x4(_mm_loadu_ps(singles[k] + column))};
      for (int g = 0; g < Groups; ++g) acc[g][k] = fma(single, group[g], acc[g][k]);
    }
  }
  for (int g = 0; g < Groups; ++g) sums[g] = sum_four(acc[g]);
}

inline __mmask8 lanes(int64_t first, int64_t last) {
  return first < last ? static_cast<__mmask8>((1 << last) - (1 << first)) : 0;
}

// Stores the pairs of the packed vectors from `q0` on with the single ones from `k0` on.  In
// `upper` order those of a packed vector with all later single ones are neighbours in `pairs`, else
// with all earlier ones.
inline void store_pairs(__m512 sums, int64_t q0, int64_t k0, int64_t n, bool upper, float* pairs) {
  const int64_t singles = n - k0 < kTile ? n - k0 : kTile;
  const int64_t rows = n - q0 < kTile ? n - q0 : kTile;
  float* at = pairs + (upper ? pair_index(k0, q0, n, true) : pair_index(q0, k0, n, false));
  const __m128 quarters[kTile] = {_mm512_castps512_ps128(sums), _mm512_extractf32x4_ps(sums, 1),
                                  _mm512_extractf32x4_ps(sums, 2), _mm512_extractf32x4_ps(sums, 3)};
  const __mmask8 all = lanes(0, singles);
  for (int64_t q = 0; q < rows; ++q) {
    // On the diagonal a vector meets itself.
    const __mmask8 wanted = q0 != k0 ? all : upper ? lanes(q + 1, singles) : lanes(0, q);
    _mm_mask_storeu_ps(at, wanted, quarters[q]);
    at += upper ? n - (q0 + q) - 2 : q0 + q;
  }
}

// One sample, as interact_by_tiles.
inline void interact_by_quarters(const float* dense, const float* sparse, int64_t count,
                                 int64_t dim, bool upper, float* out) {
  const int64_t n = count + 1;
  const int64_t groups = blocks_of(n, kTile);
  const int64_t group_floats = kTile * blocks_of(dim, Vec::kWidth) * Vec::kWidth;
  if (dim % kColumns != 0 || groups * group_floats > kMostPacked) {
    interact_by_tiles(dense, sparse, count, dim, upper, out);
    return;
  }
  std::memcpy(out, dense, static_cast<size_t>(4 * dim));
  float* pairs = out + dim;
  alignas(64) float packed[kMostPacked];
  // Past the last vector a group repeats it; those products are not stored.
  const auto vector = [&](int64_t k) {
    const int64_t bounded = k < n ? k : n - 1;
    return bounded == 0 ? dense : sparse + (bounded - 1) * dim;
  };
  const auto four = [&](int64_t k, const float*(&vectors)[kTile]) {
    for (int64_t i = 0; i < kTile; ++i) vectors[i] = vector(k + i);
  };
  for (int64_t g = 0; g < groups; ++g) {
    const float* vectors[kTile];
    four(g * kTile, vectors);
    pack_group(vectors, dim, packed + g * group_floats);
  }
  constexpr int64_t kTogether = 4;
  for (int64_t b = 0; b < groups; ++b) {
    const float* singles[kTile];
    four(b * kTile, singles);
    const int64_t end = upper ? b + 1 : groups;
    int64_t together = 0;
    for (int64_t g = upper ? 0 : b; g < end; g += together) {
      const int64_t left = end - g;
      // One alone has too few accumulators to keep the multipliers busy: 5 are 3 and 2.
      together = left == kTogether + 1 ? kTogether - 1 : left < kTogether ? left : kTogether;
      const float* const from = packed + g * group_floats;
      __m512 sums[kTogether];
      switch (together) {
        case 1: quarter_dots<1>(singles, from, group_floats, dim, sums); break;
        case 2: quarter_dots<2>(singles, from, group_floats, dim, sums); break;
        case 3: quarter_dots<3>(singles, from, group_floats, dim, sums); break;
        default: quarter_dots<4>(singles, from, group_floats, dim, sums);
      }
      for (int64_t k = 0; k < together; ++k) {
        store_pairs(sums[k], (g + k) * kTile, b * kTile, n, upper, pairs);
      }
    }
  }
}

}  // namespace
