// Little-endian numbers inside a message's bytes. They are not aligned, so that each access is
// a copy of one number, which compilers turn into a plain load.
//
// Contract: free functions; the bytes must hold the number that is asked for.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>

#include "request/wire.h"

namespace tessera {

static_assert(std::endian::native == std::endian::little,
              "numbers on the wire are little-endian and are used as they are");

template <typename T>
T load(const std::byte* data, std::size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

}  // namespace tessera
