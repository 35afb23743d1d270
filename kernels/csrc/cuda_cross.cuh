// Bfloat16 in pairs: what both forms of a cross layer compute of them.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace tessera {
namespace {

__device__ __forceinline__ float2 widen(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// x0 * (sum + bias) + x of two neighbours, rounded once.
__device__ __forceinline__ uint32_t crossed(uint32_t x0, uint32_t x, float first, float second) {
  const float2 factor = widen(x0);
  const float2 added = widen(x);
  const __nv_bfloat162 both =
      __floats2bfloat162_rn(fmaf(factor.x, first, added.x), fmaf(factor.y, second, added.y));
  return *reinterpret_cast<const uint32_t*>(&both);
}

inline bool in_sixteens(const void* pointer, int64_t stride) {
  return (reinterpret_cast<uintptr_t>(pointer) | static_cast<uintptr_t>(stride) * 2) % 16 == 0;
}

}  // namespace
}  // namespace tessera
