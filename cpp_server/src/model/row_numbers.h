// The numbers of a patch's rows, as operators take them.
//
// Contract: a free function; any thread. Compiled against torch alone.
#pragma once

#include <ATen/core/Tensor.h>

#include "model/weights.h"

namespace tessera {

// [count] on the host, int32 where they fit, else int64. The patch has numbers.
at::Tensor row_numbers(const Patch& patch);

}  // namespace tessera
