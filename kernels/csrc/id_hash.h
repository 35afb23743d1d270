// The hash of an id of a hash-based map: the same on CPUs and GPUs.
#pragma once

#include <cstdint>

#include "ids.h"

namespace tessera {

TESSERA_HOST_DEVICE uint64_t rotated(uint64_t word, int bits) {
  return word << bits | word >> (64 - bits);
}

// MurmurHash3's 128-bit variant for 64-bit machines (Austin Appleby, public domain) of the words
// (id, 0); its two words are joined by exclusive or.
TESSERA_HOST_DEVICE uint64_t hash_of(int64_t id) {
  uint64_t word = rotated(static_cast<uint64_t>(id) * 0x87C37B91114253D5, 31) * 0x4CF5AD432745937F;
  uint64_t first = rotated(word, 27) * 5 + 0x52DCE729;
  uint64_t second = (first * 5 + 0x38495AB5) ^ 16;
  first = (first ^ 16) + second;
  second = fmix64(second + first);
  first = fmix64(first) + second;
  return first ^ (second + first);
}

}  // namespace tessera
