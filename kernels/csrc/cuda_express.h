// Kernels for features that are all alike to the last detail (cuda_express.cu), behind
// cuda_lookup.cu.
#pragma once

#include "cuda_lookup.h"

namespace tessera {

// Launches a kernel made for the call's weight type, scales and width and puts its
// cudaGetLastError() into *status.  False: there is none, and nothing was launched.
bool launch_express(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                    cudaError_t* status);

}  // namespace tessera
