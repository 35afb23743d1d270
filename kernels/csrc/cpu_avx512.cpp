#include "cpu_kernels.h"
#include "cpu_vec_avx512.h"

// In this order: each uses what those above it define.
#include "cpu_lookup_impl.h"

#include "cpu_interaction_quarters.h"

#include "cpu_interaction_impl.h"

#include "cpu_linear_impl.h"

#include "cpu_linear_bf16_impl.h"

namespace tessera {

const CpuKernels kAvx512Kernels = {"avx512",
                                   lookup,
                                   lookup_rows,
                                   dot_interaction<interact_by_quarters>,
                                   lookup_interaction<interact_by_quarters>,
                                   linear,
                                   linear_bf16};

}  // namespace tessera
