#include "cpu_kernels.h"
#include "cpu_vec_scalar.h"

// In this order: each uses what those above it define.
#include "cpu_lookup_impl.h"

#include "cpu_interaction_tiles.h"

#include "cpu_interaction_impl.h"

#include "cpu_linear_impl.h"

#include "cpu_linear_bf16_impl.h"

namespace tessera {

const CpuKernels kScalarKernels = {"scalar",
                                   lookup,
                                   lookup_rows,
                                   dot_interaction<interact_by_tiles>,
                                   lookup_interaction<interact_by_tiles>,
                                   linear,
                                   linear_bf16};

}  // namespace tessera
