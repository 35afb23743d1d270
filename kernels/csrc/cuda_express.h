// Kernels for features that are all alike to the last detail (cuda_express.cu), behind
// cuda_lookup.cu.
#pragma once

#include "cuda_lookup.h"

namespace tessera {

// Both launch a kernel made for the call's weight type, scales and width and put its
// cudaGetLastError() into *status.  False: there is none, and nothing was launched.

// For small batches (cuda_small.cuh); false also for others.
bool launch_small(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                  cudaError_t* status);

bool launch_express(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                    cudaError_t* status);

}  // namespace tessera
