// Kernels for short bags of wide rows (cuda_wide.cu), asked before all others.
#pragma once

#include "cuda_lookup.h"

namespace tessera {

// Launches a kernel made for the call's weight type and scales and puts its cudaGetLastError() into
// *status.  False: there is none, or other kernels are faster, and nothing was launched.
bool launch_wide_rows(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                      cudaError_t* status);

}  // namespace tessera
