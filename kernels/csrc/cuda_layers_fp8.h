// Layers of e4m3 numbers on a GPU: plain pointers and a stream, no torch header.
//
// A number stands for itself times a power of two that only the caller knows; the scales below
// bring the sums from the operands' unit to the result's.  What is beyond the largest number, 448,
// becomes that.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera {

// A cross layer: out = x0 * (*scales[0] * v W' + bias) + *scales[1] * x.
struct CudaCrossFp8 {
  const uint8_t* x0;      // [rows, width]
  const uint8_t* x;       // [rows, width]; may be x0 itself
  const uint8_t* v;       // [rows, inner]
  const uint8_t* weight;  // [width, inner]
  const void* bias;       // bfloat16 [width]
  const float* scales[2];
  uint8_t* out;       // [rows, width]; nothing above may overlap it
  int64_t rows;       // >= 1
  int64_t width;      // >= 1
  int64_t inner;      // >= 1
  int64_t x0_stride;  // elements from row to row
  int64_t x_stride;
  int64_t v_stride;
};

// The whole layer by one kernel on `device`.  False, and nothing is done, where the device or the
// sizes, strides or alignment are not what the kernel is made for.
bool launch_cross_fp8(const CudaCrossFp8& job, int device, cudaStream_t stream,
                      cudaError_t* status);

// What follows the layer's product: out = x0 * y + *scales[1] * x, where `job.v` is y, bfloat16
// [rows, width] with rows of v_stride elements.  Weight, bias and inner are unused.
cudaError_t launch_cross_fp8_elements(const CudaCrossFp8& job, cudaStream_t stream);

// Zero in the place of each negative one of `count` numbers, which begin on a multiple of 16.
cudaError_t launch_relu_fp8(uint8_t* numbers, int64_t count, cudaStream_t stream);

}  // namespace tessera
