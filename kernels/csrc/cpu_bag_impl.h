// One bag, and how a row's bytes become vectors, written once over `Vec`.
#pragma once

#include "cpu_kernels.h"
#include "row_values.h"

namespace {

using tessera::FeaturePlan;
using tessera::LookupJob;
using tessera::OutType;

// The part of a feature's plan that summing needs, and one bag of it.
struct Bag {
  const uint8_t* data;
  const uint8_t* scale;
  int64_t row_stride;
  int64_t scale_stride;
  int64_t scale_shift;
  int64_t scale_type;
  const int64_t* rows;
  const float* weights;  // or nullptr
  int64_t size;
};

inline Bag feature_bag(const LookupJob& job, const FeaturePlan& plan) {
  return {job.weights + plan.data_offset,
          job.weights + plan.scale_offset,
          plan.row_stride,
          plan.scale_stride,
          plan.scale_shift,
          plan.scale_type,
          nullptr,
          nullptr,
          0};
}

inline void take_ids(const LookupJob& job, int64_t begin, int64_t end, Bag* bag) {
  bag->rows = job.rows + begin;
  bag->weights = job.id_weights == nullptr ? nullptr : job.id_weights + begin;
  bag->size = end - begin;
}

template <int64_t T>
inline Vec load_weights(const uint8_t* row, int64_t column) {
  if constexpr (T == tessera::kFloat32) {
    float values[Vec::kWidth];
    std::memcpy(values, row + 4 * column, sizeof(values));
    return Vec::load(values);
  } else if constexpr (T == tessera::kFloat16) {
    return Vec::load_half(row + 2 * column);
  } else if constexpr (T == tessera::kBFloat16) {
    return Vec::load_bfloat(row + 2 * column);
  } else if constexpr (T == tessera::kFloat8) {
    return Vec::load_float8(row + column);
  } else if constexpr (T == tessera::kInt8) {
    return Vec::load_int8(row + column);
  } else if constexpr (T == tessera::kBlockInt8) {
    return add(Vec::load_int8(row + column), Vec::set(-128.0f));
  } else if constexpr (T == tessera::kInt4 && Vec::kWidth > 1) {
    return Vec::load_int4(row + column / 2);
  } else {
    float values[Vec::kWidth];
    for (int64_t k = 0; k < Vec::kWidth; ++k) {
      values[k] = tessera::RowValues<T>::number(row, column + k);
    }
    return Vec::load(values);
  }
}

// The first `count` (< Vec::kWidth) columns from `column` on; nothing past them is read.
template <int64_t T>
inline Vec load_some_weights(const uint8_t* row, int64_t column, int64_t count) {
  uint8_t copy[4 * Vec::kWidth] = {};
  constexpr int64_t kBits = tessera::number_bits(T);
  std::memcpy(copy, row + column * kBits / 8, static_cast<size_t>((count * kBits + 7) / 8));
  return load_weights<T>(copy, 0);
}

inline void load_scale(const Bag& bag, int64_t row, float* scale, float* bias) {
  const uint8_t* at = bag.scale + (row >> bag.scale_shift) * bag.scale_stride;
  if (bag.scale_type == tessera::kHalfScale) {
    load_half_pair(at, scale, bias);
  } else {
    std::memcpy(scale, at, 4);
    std::memcpy(bias, at + 4, 4);
  }
}

// What the vector of columns from `column` on is multiplied by: `factor` (in every element of
// `factors`) times the scale of its block, where blocks have scales.
template <int64_t T>
inline Vec column_scales(const uint8_t* book, const uint8_t* row, int64_t column, float factor,
                         Vec factors) {
  if constexpr (T == tessera::kBlockInt8) {
    uint32_t word;
    std::memcpy(&word, row + column / tessera::kBlockColumns * tessera::kBlockColumns, 4);
    float scale;
    std::memcpy(&scale, book + 4 * tessera::block_code(word), 4);
    return Vec::set(factor * scale);
  } else {
    return factors;
  }
}

// The same for the vectors of a row's first N vectors' columns, where blocks have scales: `book`
// was made by load_book.
template <int64_t T, int N>
inline void row_scales(const Book& book, const uint8_t* row, float factor, Vec (&scales)[N]) {
  const Vec factors = Vec::set(factor);
  if constexpr (T == tessera::kBlockInt8) {
    book_scales(book, row, scales);
    for (int k = 0; k < N; ++k) scales[k] = multiply(factors, scales[k]);
  } else {
    for (int k = 0; k < N; ++k) scales[k] = factors;
  }
}

}  // namespace
