// What training under bfloat16 computes on a GPU beside products of matrices: plain pointers and a
// stream, no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera {

constexpr int64_t kMostPairVectors = 32;  // of a sample, the dense one among them
constexpr int64_t kPairColumns = 8;       // vectors are multiples of so many numbers, 16 bytes

// DLRM's dot interaction of bfloat16 vectors and its gradient.  All arrays are contiguous and begin
// on a multiple of 16 bytes.
struct CudaPairs {
  const void* dense;   // [batch, dim]
  const void* sparse;  // [batch, count * dim]
  void* out;           // [batch, dim + count (count + 1) / 2]; of the gradient's call an input
  void* dense_grad;    // like `dense`; of the gradient's call
  void* sparse_grad;   // like `sparse`; of the gradient's call
  int64_t batch;       // >= 1
  int64_t count;       // 1 to kMostPairVectors - 1
  int64_t dim;         // a multiple of kPairColumns
};

cudaError_t launch_pairs(const CudaPairs& job, cudaStream_t stream);
cudaError_t launch_pairs_backward(const CudaPairs& job, cudaStream_t stream);

// What passes back through a ReLU, and its sum over the rows, which is a bias's gradient.
// All arrays are contiguous, the bfloat16 ones begin on a multiple of 16 bytes.
struct CudaReluGrad {
  const void* grad;    // [rows, columns] bfloat16
  const void* output;  // like `grad`: what the ReLU gave
  void* passed;        // like `grad`
  float* partial;      // [relu_grad_parts(rows, columns), columns]
  float* sums;         // [columns]
  int64_t rows;        // >= 1
  int64_t columns;     // a multiple of kPairColumns, >= 1
};

// How many parts the rows are cut into.
int64_t relu_grad_parts(int64_t rows, int64_t columns);

cudaError_t launch_relu_grad(const CudaReluGrad& job, cudaStream_t stream);

}  // namespace tessera
