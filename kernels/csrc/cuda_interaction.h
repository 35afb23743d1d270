// DLRM's dot interaction on a GPU: plain pointers and a stream, no torch header.
//
// Both functions only launch: they return at once.
#pragma once

#include "cuda_lookup.h"

namespace tessera {

// Per sample: `dense` [dim], and `count` vectors of the same width side by side in `sparse`; out
// [batch, dim + (count + 1) * count / 2] as in cpu_kernels.h.  All float32.
struct CudaInteraction {
  const float* dense;
  int64_t dense_stride;  // elements from sample to sample
  const float* sparse;   // nullptr where the vectors are looked up
  int64_t sparse_stride;
  int64_t batch;  // >= 1
  int64_t count;
  int64_t dim;  // >= 1
  bool upper;
  float* out;
};

cudaError_t launch_interaction(const CudaInteraction& job, cudaStream_t stream);

// Looks up and multiplies in one pass, so that pooled vectors never reach memory; made for bags of
// about one id.  The lookup's `out` is not used.  Puts its cudaGetLastError() into *status.  False:
// there is no kernel for these features, and nothing was launched.
bool launch_lookup_interaction(const CudaLookup& lookup, const CudaInteraction& job,
                               cudaStream_t stream, cudaError_t* status);

}  // namespace tessera
