// The CPU kernels' interface: raw pointers, no torch header, no allocation, no thread of its own.
//
// Every function here may be called from any thread at once; a call touches only what its
// arguments name.  Sizes and ids have been checked before (see binding_cpu.cpp): kernels trust
// rows[] to hold rows that can be read, or kSkipped, and offsets[] to be non-decreasing.
#pragma once

#include <cstdint>
#include <limits>

#include "plan.h"

namespace tessera {

class LaidStorage;

// In rows[] and starts[]: the id contributes nothing.
constexpr int64_t kSkipped = std::numeric_limits<int64_t>::min();

// A pooled lookup of F features over B bags each.  Bag (f, b) is number f * B + b and owns the ids
// offsets[bag] .. offsets[bag + 1].
struct LookupJob {
  const uint8_t* weights;   // the weight buffer
  const FeaturePlan* plan;  // [features]
  int64_t features;         // F >= 1
  int64_t batch;            // B >= 0
  const int64_t* offsets;   // [F * B + 1]
  const int64_t* rows;      // [N] rows already resolved, of a table or beside it (row_overlay.h)
  const int64_t* starts;    // [N] where their data begins, bytes from weights on
  const float* id_weights;  // [N] or nullptr
  void* out;                // [B, out_width]
  OutType out_type;
  int64_t out_width;                  // elements of one output row
  const LaidStorage* laid = nullptr;  // rows to be read in place of some of the buffer's
};

// A dense layer, y = x W^T + b and perhaps a ReLU.  The weights lie in panels of `panel` outputs
// (a multiple of 16), each [inputs, panel]; the last one is filled up with zeros.
struct LinearJob {
  const float* input;    // [rows, inputs]
  int64_t input_stride;  // elements from row to row
  int64_t inputs;
  const float* weights;  // [panels, inputs, panel]
  int64_t panel;
  const float* bias;  // [panels * panel]
  int64_t outputs;    // in the last panel, or filling it
  bool relu;
  float* out;  // [rows, outputs]
};

// The same with bfloat16 weights and inputs, in tiles of 32 inputs x 16 outputs.  A tile is 16 rows
// of 32 numbers; row p holds inputs 2 p and 2 p + 1 of each output, side by side.  Inputs and
// outputs beyond the layer's are zeros.
//
// What is computed, in float32, each line in this order and rounded once per operation, to nearest:
//   x      = the input rounded to bfloat16
//   y      = bias
//   for each 32 inputs:  even = fma(x[2 p], w[2 p], even) from 0, for p = 0 .. 15
//                        odd = fma(x[2 p + 1], w[2 p + 1], odd) from 0, likewise
//                        y = y + (even + odd)
// Subnormal operands and results are zeros of their sign (on x86).  These are the sums of AMX's
// tdpbf16ps; every other instruction set computes the same, so the bits do not depend on it.
struct LinearBf16Job {
  const float* input;       // [rows, inputs]
  int64_t input_stride;     // elements from row to row
  int64_t inputs;           // in the last block, or filling it
  const uint16_t* weights;  // [groups of 16 outputs, blocks of 32 inputs, 16, 32]
  int64_t blocks;
  const float* bias;  // [groups * 16]
  int64_t outputs;    // in the last group, or filling it
  bool relu;
  float* out;  // [rows, outputs]
};

constexpr int64_t kBf16Inputs = 32;   // of a tile
constexpr int64_t kBf16Outputs = 16;  // of a tile
constexpr int64_t kBf16Tile = kBf16Inputs * kBf16Outputs;
// How many rows linear_bf16 takes at a time: their inputs and a panel of weights fit the second
// cache.
constexpr int64_t kBf16RowsTogether = 96;

// One instruction set's kernels.
struct CpuKernels {
  const char* name;

  // Fills the columns of bags [bag_begin, bag_end) (numbers f * B + b).  Every column of a bag is
  // written, zeros for an empty one.
  void (*lookup)(const LookupJob& job, int64_t bag_begin, int64_t bag_end);

  // Writes the vector of id i, without pooling, to row i of out [N, out_width].
  void (*lookup_rows)(const LookupJob& job, int64_t bag_begin, int64_t bag_end);

  // DLRM's interaction.  dense [B, dim], sparse [B, count * dim] (row strides in elements), out
  // [B, dim + (count + 1) * count / 2] contiguous: the dense vector, then the dot products of each
  // pair (i, j), j < i, row by row (with_lower = true) or (i, j), i < j, row by row.
  void (*dot_interaction)(const float* dense, int64_t dense_stride, const float* sparse,
                          int64_t sparse_stride, int64_t batch, int64_t count, int64_t dim,
                          bool upper, float* out);

  // Both in one pass for samples [sample_begin, sample_end): pooled vectors stay in `scratch`
  // ((features + 1) * dim floats).  All features have the same dim; out_column is not read.
  void (*lookup_interaction)(const LookupJob& job, const float* dense, int64_t dense_stride,
                             int64_t dim, bool upper, int64_t sample_begin, int64_t sample_end,
                             float* scratch);

  // The dense layer for rows [row_begin, row_end).  A row's bits do not depend on the others.
  void (*linear)(const LinearJob& job, int64_t row_begin, int64_t row_end);

  // The same with bfloat16.  `scratch` is for the rounded inputs: job.blocks * kBf16Inputs floats
  // for each of the rows, rounded up to 16, or of kBf16RowsTogether if they are more; 64-byte
  // aligned.
  void (*linear_bf16)(const LinearBf16Job& job, int64_t row_begin, int64_t row_end, float* scratch);
};

extern const CpuKernels kScalarKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
extern const CpuKernels kAvx512IntelKernels;  // the same, prefetching for Intel's processors
#if defined(TESSERA_AMX)
// CpuKernels::linear_bf16 by AMX.
void linear_bf16_amx(const LinearBf16Job& job, int64_t row_begin, int64_t row_end, float* scratch);
#endif
#endif

// The best set for this machine, chosen once.  The environment variable TESSERA_CPU_KERNELS
// (scalar, avx2, avx512, amx) names the best that may be taken; one that the machine cannot run is
// not.
const CpuKernels& cpu_kernels();

}  // namespace tessera
