// Dense layers of few inputs or few outputs on a GPU: plain pointers and a stream, no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan.h"

namespace tessera {

constexpr int64_t kThin = 16;  // a thin layer has fewer inputs or fewer outputs

// out = scale * (input W' + bias), with a ReLU where it is wanted, computed in float32 and rounded
// once.
struct CudaThin {
  const void* input;     // [rows, inputs], float32 or, where `narrow_input`, bfloat16
  const float* weight;   // [outputs, inputs], contiguous
  const float* bias;     // [outputs]
  void* out;             // [rows, outputs] of `out_type`
  int64_t rows;          // >= 1
  int64_t inputs;        // >= 1
  int64_t outputs;       // >= 1; this or `inputs` is less than kThin
  int64_t input_stride;  // elements from row to row
  bool narrow_input;
  bool relu;
  OutType out_type;  // not kFloat16
  float scale;       // under OutType::kFloat8; elsewhere 1
};

cudaError_t launch_thin(const CudaThin& job, cudaStream_t stream);

}  // namespace tessera
