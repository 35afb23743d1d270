// Kernels for calls of few short bags (cuda_quick.cu), asked before all others.
#pragma once

#include "cuda_lookup.h"

namespace tessera {

// Launches a kernel made for the call's weight type and scales and puts its cudaGetLastError() into
// *status.  False: there is none or the call has too many bags, and nothing was launched.
bool launch_quick(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                  cudaError_t* status);

}  // namespace tessera
