// Kernels for calls of about one id a bag (cuda_short.cu), asked before all others but
// those of cuda_wide.h.
#pragma once

#include "cuda_lookup.h"

namespace tessera {

// Launches a kernel made for the call's weight type and scales and puts its cudaGetLastError() into
// *status.  False: there is none, or the call has longer bags or too few, and nothing was launched.
bool launch_short_bags(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                       cudaError_t* status);

}  // namespace tessera
