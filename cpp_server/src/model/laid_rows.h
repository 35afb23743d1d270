// A commit's rows laid over those of tables by the operators that look rows up.
//
// Contract: a free function, any thread; the operators' library must be loaded. Compiled against
// torch alone.
#pragma once

#include "model/weights.h"

namespace tessera {

// Makes laid rows; null where the library that is loaded is an older one, without such operators.
LayRows lay_rows_by_operators();

}  // namespace tessera
