// e4m3 in device code, for every GPU: CUDA.s own header has the instructions.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace tessera {
namespace {

// Two neighbours, the first in the low byte.
__device__ __forceinline__ float2 widen_fp8(uint32_t pair) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair & 0xffffu), __NV_E4M3);
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

__device__ __forceinline__ uint32_t narrow_fp8(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint32_t narrow_fp8(float a, float b, float c, float d) {
  return narrow_fp8(a, b) | narrow_fp8(c, d) << 16;
}

}  // namespace
}  // namespace tessera
