// One number of a row, per weight type: the plain reading that every kernel can fall back on.
//
// A weight type without a RowValues does not compile.  With one, the CPU and the GPU look its rows
// up column by column; load_weights (cpu_bag_impl.h) and decode_share (cuda_decode.cuh) read the
// types that have a faster way several columns at a time.
//
// Plain C++: no torch header, usable in device code.
#pragma once

#include "plan.h"

#if defined(__CUDA_ARCH__)
#include <cuda_fp16.h>
#endif

namespace tessera {

TESSERA_ANY_DEVICE inline uint32_t little_endian_16(const uint8_t* at) {
  return static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8;
}

TESSERA_ANY_DEVICE inline uint32_t little_endian_32(const uint8_t* at) {
  return little_endian_16(at) | little_endian_16(at + 2) << 16;
}

TESSERA_ANY_DEVICE inline float float_of_bits(uint32_t bits) {
  union {
    uint32_t bits;
    float value;
  } both;
  both.bits = bits;
  return both.value;
}

TESSERA_ANY_DEVICE inline float float_of_half(uint32_t half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
#else
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Moving the exponent by multiplication also makes subnormal halves right.
  constexpr float kTwoTo112 = 5192296858534827628530496329220096.0f;
  const float value = float_of_bits(magnitude << 13) * kTwoTo112;
  return sign == 0 ? value : -value;
#endif
}

// The number in `column` of the row whose data begins at `row`, before scale and bias.
template <int64_t T>
struct RowValues;

template <>
struct RowValues<kFloat32> {
  TESSERA_ANY_DEVICE static float number(const uint8_t* row, int64_t column) {
    return float_of_bits(little_endian_32(row + 4 * column));
  }
};

template <>
struct RowValues<kFloat16> {
  TESSERA_ANY_DEVICE static float number(const uint8_t* row, int64_t column) {
    return float_of_half(little_endian_16(row + 2 * column));
  }
};

template <>
struct RowValues<kBFloat16> {
  TESSERA_ANY_DEVICE static float number(const uint8_t* row, int64_t column) {
    return float_of_bits(little_endian_16(row + 2 * column) << 16);
  }
};

template <>
struct RowValues<kFloat8> {
  // e4m3fn read as an fp16 whose exponent is 8 too small.
  TESSERA_ANY_DEVICE static float number(const uint8_t* row, int64_t column) {
    const uint32_t x = row[column];
    return float_of_half(((x & 0x80u) << 8) | ((x & 0x7fu) << 7)) * 256.0f;
  }
};

template <>
struct RowValues<kInt8> {
  TESSERA_ANY_DEVICE static float number(const uint8_t* row, int64_t column) {
    return static_cast<float>(row[column]);
  }
};

template <>
struct RowValues<kInt4> {
  TESSERA_ANY_DEVICE static float number(const uint8_t* row, int64_t column) {
    return static_cast<float>((row[column / 2] >> (4 * (column & 1))) & 0xf);
  }
};

template <>
struct RowValues<kBlockInt8> {
  TESSERA_ANY_DEVICE static float number(const uint8_t* row, int64_t column) {
    return static_cast<float>(row[column]) - 128.0f;
  }
};

}  // namespace tessera
