// The flags of tessera-server's own HTTP/2 layer, which Python's library has not.
//
// Contract: a free function without state; the flags refer to what they are made of.
#pragma once

#include <vector>

#include "common/flags.h"
#include "http2/limits.h"

namespace tessera {

// What one client of the gRPC port may take, so that the others are answered. `limits` holds the
// defaults and outlives the flags.
std::vector<Flag> connection_flags(http2::Limits& limits);

}  // namespace tessera
