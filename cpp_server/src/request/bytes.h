// Bytes that somebody else holds.
//
// Contract: a name.
#pragma once

#include <cstddef>
#include <span>

namespace tessera {

using Bytes = std::span<const std::byte>;

}  // namespace tessera
