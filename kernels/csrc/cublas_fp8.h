// Products of e4m3 numbers by cuBLASLt, with the ReLU in the product: torch's own call of it takes
// a bias and no more, so that a ReLU is another pass over the result.  Plain pointers and a stream,
// no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace tessera {

// out = max(*scales[0] * *scales[1] * input weight' + bias, 0).
struct CublasFp8 {
  const uint8_t* input;    // [rows, inputs]
  const uint8_t* weight;   // [outputs, inputs]
  const void* bias;        // bfloat16 [outputs], or null
  const float* scales[2];  // on the device, on multiples of 16 bytes
  void* out;               // [rows, outputs], e4m3 (what is beyond 448 becomes 448) or bfloat16
  bool narrow_out;         // whether it is e4m3
  int64_t rows;            // >= 1
  int64_t inputs;          // multiples of 16, as are outputs and input_stride
  int64_t outputs;
  int64_t input_stride;  // elements from row to row
  void* workspace;       // on a multiple of 256 bytes; used until the product is done
  size_t workspace_bytes;
};

// Begins the product on the current device.  False, and nothing is begun, where cuBLASLt has no
// way to do it; then `out` must be made otherwise.
bool launch_relu_product_fp8(const CublasFp8& job, cudaStream_t stream);

}  // namespace tessera
