// A dense layer with bfloat16 weights, written once over `Vec`; each instruction set includes this
// file.  cpu_kernels.h says what it computes and in which order.
//
// Weights become floats in registers, once for all rows of a tile: a bfloat16 is the upper half of
// a float.  Inputs are rounded first, for all outputs, and stay floats.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu_flush.h"
#include "cpu_kernels.h"

namespace {

using tessera::kBf16Inputs;
using tessera::kBf16Outputs;
using tessera::kBf16RowsTogether;
using tessera::kBf16Tile;
using tessera::LinearBf16Job;

// Two sums per output and the weights' two halves fit the registers: 24 + 4 + 1 of 32, or
// 10 + 2 + 1 of 16.  One row takes more columns, for chains of sums enough to hide an fma's time.
constexpr int kBf16TileRows = Vec::kWidth == 16 ? 6 : Vec::kWidth == 8 ? 5 : 1;
constexpr int kBf16Vectors = Vec::kWidth == 16 ? 2 : Vec::kWidth == 8 ? 1 : 16;
constexpr int kBf16WideVectors = Vec::kWidth == 1 ? 16 : 4;

// Rounds a row to bfloat16 into whole blocks of floats, filled up with zeros.
inline void round_row(const float* input, int64_t inputs, int64_t padded, float* to) {
  int64_t k = 0;
  for (; k + Vec::kWidth <= inputs; k += Vec::kWidth) {
    round_to_bfloat(Vec::load(input + k)).store(to + k);
  }
  if (k < padded) {
    float rest[kBf16Inputs] = {};
    std::memcpy(rest, input + k, static_cast<size_t>(4 * (inputs - k)));
    for (int64_t at = 0; k + at < padded; at += Vec::kWidth) {
      round_to_bfloat(Vec::load(rest + at)).store(to + k + at);
    }
  }
}

// Outputs [column, column + V * kWidth) of R rows.
template <int R, int V>
inline void bf16_tile(const LinearBf16Job& job, const float* rows, int64_t column, float* out) {
  constexpr int64_t kWidth = Vec::kWidth;
  const int64_t row_stride = job.blocks * kBf16Inputs;
  const uint16_t* weights[V];
  Vec total[R][V];
  for (int v = 0; v < V; ++v) {
    const int64_t at = column + v * kWidth;
    weights[v] = job.weights + at / kBf16Outputs * job.blocks * kBf16Tile + at % kBf16Outputs * 2;
    for (int r = 0; r < R; ++r) total[r][v] = Vec::load(job.bias + at);
  }
  for (int64_t block = 0; block < job.blocks; ++block) {
    const float* x = rows + block * kBf16Inputs;
    const int64_t left = job.inputs - block * kBf16Inputs;
    const int64_t pairs = left >= kBf16Inputs ? kBf16Inputs / 2 : (left + 1) / 2;
    Vec even[R][V];
    Vec odd[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) even[r][v] = odd[r][v] = Vec::zero();
    }
    for (int64_t p = 0; p < pairs; ++p) {
      Vec first[V];
      Vec second[V];
      for (int v = 0; v < V; ++v) {
        const uint16_t* w = weights[v] + block * kBf16Tile + p * kBf16Inputs;
        first[v] = Vec::load_even(w);
        second[v] = Vec::load_odd(w);
      }
      for (int r = 0; r < R; ++r) {
        const Vec x_even = Vec::set(x[r * row_stride + 2 * p]);
        const Vec x_odd = Vec::set(x[r * row_stride + 2 * p + 1]);
        for (int v = 0; v < V; ++v) {
          even[r][v] = fma(x_even, first[v], even[r][v]);
          odd[r][v] = fma(x_odd, second[v], odd[r][v]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) {
        if (pairs < kBf16Inputs / 2) {
          // Adding the products of zeros, which were left out, would have made a -0 a +0.
          even[r][v] = add(even[r][v], Vec::zero());
          odd[r][v] = add(odd[r][v], Vec::zero());
        }
        total[r][v] = add(total[r][v], add(even[r][v], odd[r][v]));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      const Vec y = job.relu ? relu(total[r][v]) : total[r][v];
      float* to = out + r * job.outputs + column + v * kWidth;
      const int64_t columns = job.outputs - column - v * kWidth;
      if (columns >= kWidth) {
        y.store(to);
      } else if (columns > 0) {
        float copy[kWidth];
        y.store(copy);
        std::memcpy(to, copy, static_cast<size_t>(4 * columns));
      }
    }
  }
}

// Outputs [column, column + V * kWidth) of all rows.
template <int V>
inline void bf16_columns(const LinearBf16Job& job, int64_t rows, const float* inputs,
                         int64_t column, float* out) {
  const int64_t row_stride = job.blocks * kBf16Inputs;
  for (int64_t row = 0; row < rows; row += kBf16TileRows) {
    const float* x = inputs + row * row_stride;
    float* y = out + row * job.outputs;
    switch (std::min<int64_t>(kBf16TileRows, rows - row)) {
      case 1: bf16_tile<1, V>(job, x, column, y); break;
      case 2: bf16_tile<std::min(2, kBf16TileRows), V>(job, x, column, y); break;
      case 3: bf16_tile<std::min(3, kBf16TileRows), V>(job, x, column, y); break;
      case 4: bf16_tile<std::min(4, kBf16TileRows), V>(job, x, column, y); break;
      case 5: bf16_tile<std::min(5, kBf16TileRows), V>(job, x, column, y); break;
      default: bf16_tile<kBf16TileRows, V>(job, x, column, y);
    }
  }
}

// All outputs of all rows, V vectors at a time while there are as many.
template <int V, class Columns>
inline void bf16_outputs(const LinearBf16Job& job, const Columns& columns) {
  const int64_t padded = (job.outputs + kBf16Outputs - 1) / kBf16Outputs * kBf16Outputs;
  int64_t column = 0;
  for (; column + V * Vec::kWidth <= padded; column += V * Vec::kWidth) {
    columns(std::integral_constant<int, V>(), column);
  }
  for (; column < padded; column += Vec::kWidth) {
    columns(std::integral_constant<int, 1>(), column);
  }
}

[[gnu::noinline]] void linear_bf16_rows(const LinearBf16Job& job, int64_t row_begin,
                                        int64_t row_end, float* scratch) {
  const int64_t padded = job.blocks * kBf16Inputs;
  for (int64_t begin = row_begin; begin < row_end; begin += kBf16RowsTogether) {
    const int64_t rows = std::min(kBf16RowsTogether, row_end - begin);
    for (int64_t r = 0; r < rows; ++r) {
      round_row(job.input + (begin + r) * job.input_stride, job.inputs, padded,
                scratch + r * padded);
    }
    float* out = job.out + begin * job.outputs;
    if (rows == 1) {
      bf16_outputs<kBf16WideVectors>(job, [&](auto vectors, int64_t column) {
        bf16_tile<1, vectors()>(job, scratch, column, out);
      });
    } else {
      bf16_outputs<kBf16Vectors>(job, [&](auto vectors, int64_t column) {
        bf16_columns<vectors()>(job, rows, scratch, column, out);
      });
    }
  }
}

void linear_bf16(const LinearBf16Job& job, int64_t row_begin, int64_t row_end, float* scratch) {
  const FlushSubnormals flush;
  linear_bf16_rows(job, row_begin, row_end, scratch);
}

}  // namespace
