// A dense layer, written once over `Vec`; each instruction set includes this file.
//
// An output is bias, then one fma per input in order, in one accumulator: its bits depend neither
// on the other rows of the batch nor on the instruction set.  A tile of kTileRows x kTileVectors
// accumulators stays in registers for all inputs; its weights are one contiguous run of a panel
// and come from the second cache, once per tile.
#pragma once

#include <algorithm>

#include "cpu_kernels.h"

namespace {

using tessera::LinearJob;

// Accumulators, weights and one input fit the registers: 24 + 4 + 1 of 32, or 12 + 2 + 1 of 16.
constexpr int kTileRows = 6;
constexpr int kTileVectors = Vec::kWidth == 16 ? 4 : Vec::kWidth == 8 ? 2 : 4;
// Rows that go through all panels together: with a panel they fit the second cache.
constexpr int64_t kRowsTogether = 16 * kTileRows;

template <int R, int V>
inline void linear_tile(const LinearJob& job, const float* input, const float* weights,
                        const float* bias, float* out, int64_t columns) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = Vec::load(bias + v * Vec::kWidth);
  }
  for (int64_t k = 0; k < job.inputs; ++k) {
    Vec w[V];
    for (int v = 0; v < V; ++v) w[v] = Vec::load(weights + k * job.panel + v * Vec::kWidth);
    for (int r = 0; r < R; ++r) {
      const Vec x = Vec::set(input[r * job.input_stride + k]);
      for (int v = 0; v < V; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    float* to = out + r * job.outputs;
    float copy[V * Vec::kWidth];
    for (int v = 0; v < V; ++v) {
      const Vec y = job.relu ? relu(acc[r][v]) : acc[r][v];
      y.store((columns < V * Vec::kWidth ? copy : to) + v * Vec::kWidth);
    }
    if (columns < V * Vec::kWidth) {
      std::memcpy(to, copy, static_cast<size_t>(4 * columns));
    }
  }
}

template <int V>
inline void linear_rows(const LinearJob& job, int64_t rows, const float* input,
                        const float* weights, const float* bias, float* out, int64_t columns) {
  static_assert(kTileRows == 6, "a case for each smaller number of rows");
  switch (rows) {
    case 1: return linear_tile<1, V>(job, input, weights, bias, out, columns);
    case 2: return linear_tile<2, V>(job, input, weights, bias, out, columns);
    case 3: return linear_tile<3, V>(job, input, weights, bias, out, columns);
    case 4: return linear_tile<4, V>(job, input, weights, bias, out, columns);
    case 5: return linear_tile<5, V>(job, input, weights, bias, out, columns);
    default: return linear_tile<6, V>(job, input, weights, bias, out, columns);
  }
}

// All rows of [begin, end) against the columns of one tile's width.
template <int V>
inline void linear_columns(const LinearJob& job, int64_t begin, int64_t end, int64_t column) {
  const int64_t panel = column / job.panel;
  const float* weights = job.weights + panel * job.panel * job.inputs + column % job.panel;
  const int64_t columns = std::min<int64_t>(V * Vec::kWidth, job.outputs - column);
  for (int64_t row = begin; row < end; row += kTileRows) {
    linear_rows<V>(job, std::min<int64_t>(kTileRows, end - row), job.input + row * job.input_stride,
                   weights, job.bias + column, job.out + row * job.outputs + column, columns);
  }
}

void linear(const LinearJob& job, int64_t row_begin, int64_t row_end) {
  for (int64_t begin = row_begin; begin < row_end; begin += kRowsTogether) {
    const int64_t end = std::min(begin + kRowsTogether, row_end);
    if (job.panel % (kTileVectors * Vec::kWidth) == 0) {
      for (int64_t column = 0; column < job.outputs; column += kTileVectors * Vec::kWidth) {
        linear_columns<kTileVectors>(job, begin, end, column);
      }
    } else {
      for (int64_t column = 0; column < job.outputs; column += Vec::kWidth) {
        linear_columns<1>(job, begin, end, column);
      }
    }
  }
}

}  // namespace
