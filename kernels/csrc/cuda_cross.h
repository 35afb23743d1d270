// A cross layer's second product and what follows it, `x0 * (v W' + b) + x`, in bfloat16: plain
// pointers and a stream, no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera {

// All matrices are bfloat16 with contiguous rows; sums are float32, and a result is rounded once.
struct CudaCross {
  const void* x0;      // [rows, width]
  const void* x;       // [rows, width]; may be x0 itself
  const void* v;       // [rows, inner]; in launch_cross_elements, the layer's output [rows, width]
  const void* weight;  // [width, inner]; unused in launch_cross_elements
  const void* bias;    // [width]; unused in launch_cross_elements
  void* out;           // [rows, width]; nothing above may overlap it
  int64_t rows;        // >= 1
  int64_t width;       // >= 1
  int64_t inner;       // >= 1
  int64_t x0_stride;   // elements from row to row
  int64_t x_stride;
  int64_t v_stride;
};

// out = x0 * (v W' + bias) + x by one kernel on `device`.  False, and nothing is done, where the
// device or the sizes, strides or alignment are not what the kernel is made for.
bool launch_cross(const CudaCross& job, int device, cudaStream_t stream, cudaError_t* status);

// out = x0 * v + x, whatever the sizes, strides and alignment.
cudaError_t launch_cross_elements(const CudaCross& job, cudaStream_t stream);

}  // namespace tessera
