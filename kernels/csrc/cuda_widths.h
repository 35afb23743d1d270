// Kernels for features of one kind and any widths (cuda_widths.cu), behind cuda_lookup.cu.
#pragma once

#include "cuda_lookup.h"

namespace tessera {

// Launches a kernel made for the call's weight type and scales and puts its cudaGetLastError() into
// *status.  False: there is none, and nothing was launched.
bool launch_widths(const CudaLookup& job, int multiprocessors, cudaStream_t stream,
                   cudaError_t* status);

}  // namespace tessera
