// From the bytes of a row to float32, per weight type, and from float32 to an output type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "float8.cuh"
#include "plan.h"
#include "row_values.h"

namespace tessera {

// One thread's share of a row: kBytes bytes (one load) that hold kColumns columns.
template <int64_t T>
struct Share {
  static constexpr int kBits = static_cast<int>(number_bits(T));
  static constexpr int kColumns = 128 / kBits < 16 ? 128 / kBits : 16;
  static constexpr int kBytes = kColumns * kBits / 8;
};

__device__ __forceinline__ float half_bits_to_float(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// e4m3fn read as an fp16 whose exponent is 8 too small.
__device__ __forceinline__ float float8_to_float(uint32_t x) {
  return half_bits_to_float(((x & 0x80u) << 8) | ((x & 0x7fu) << 7)) * 256.0f;
}

// The four of a word, two at a time: half as many instructions.
__device__ __forceinline__ void float8s_to_floats(uint32_t word, float* out) {
  const __half2 scale = __float2half2_rn(256.0f);
  const uint32_t upper = word << 8;  // has bytes 0 and 2 where the word has 1 and 3
  const uint32_t even = ((upper >> 1) & 0x3f803f80u) | (upper & 0x80008000u);
  const uint32_t odd = ((word >> 1) & 0x3f803f80u) | (word & 0x80008000u);
  const float2 evens = __half22float2(__hmul2(*reinterpret_cast<const __half2*>(&even), scale));
  const float2 odds = __half22float2(__hmul2(*reinterpret_cast<const __half2*>(&odd), scale));
  out[0] = evens.x;
  out[1] = odds.x;
  out[2] = evens.y;
  out[3] = odds.y;
}

// Byte k of a word as a float, less Zero: put it under the exponent of 2^23 and take 2^23 + Zero
// away.  Exact, and cheaper than a conversion instruction.
template <int K, int Zero>
__device__ __forceinline__ float byte_to_float(uint32_t word) {
  constexpr float kTake = 8388608.0f + Zero;
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7650 | K)) - kTake;
}

template <int Zero = 0>
__device__ __forceinline__ void bytes_to_floats(uint32_t word, float* out) {
  out[0] = byte_to_float<0, Zero>(word);
  out[1] = byte_to_float<1, Zero>(word);
  out[2] = byte_to_float<2, Zero>(word);
  out[3] = byte_to_float<3, Zero>(word);
}

// Byte k of a word as a float, times 2^-133: that is what a float is whose bits hold the byte from
// bit 16 on, both where the exponent is 0 and where the byte's highest bit makes it 1.
template <int K>
__device__ __forceinline__ float byte_to_tiny(uint32_t word) {
  return __uint_as_float(__byte_perm(word, 0, 0x4044 | K << 8));
}

__device__ __forceinline__ void bytes_to_tiny(uint32_t word, float* out) {
  out[0] = byte_to_tiny<0>(word);
  out[1] = byte_to_tiny<1>(word);
  out[2] = byte_to_tiny<2>(word);
  out[3] = byte_to_tiny<3>(word);
}

// Sums of whole numbers times scales of half precision can be kept 2^-60 times as large as they
// are: such products are multiples of 2^-24 and sums of them either 0 or at least that, so none of
// them becomes so small that bits are lost, and every rounding is that of the sum itself.  With
// scales 2^73 times as large, the numbers need not be brought up from 2^-133, which is an
// instruction less for a column.
constexpr float kTinyScale = 0x1p73f;
constexpr float kTinySum = 0x1p60f;

// Whether numbers of weight type T can be read so.
TESSERA_ANY_DEVICE constexpr bool reads_tiny(int64_t weight_type) {
  return weight_type == kInt8 || weight_type == kInt4;
}

// The columns of a share, times 2^-133.
template <int64_t T>
__device__ __forceinline__ void decode_tiny(const uint32_t* words,
                                            float (&out)[Share<T>::kColumns]) {
  static_assert(reads_tiny(T));
  if constexpr (T == kInt8) {
#pragma unroll
    for (int k = 0; k < 4; ++k) bytes_to_tiny(words[k], out + 4 * k);
  } else {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float even[4];
      float odd[4];
      bytes_to_tiny(words[k] & 0x0f0f0f0fu, even);
      bytes_to_tiny((words[k] >> 4) & 0x0f0f0f0fu, odd);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        out[8 * k + 2 * j] = even[j];
        out[8 * k + 2 * j + 1] = odd[j];
      }
    }
  }
}

template <int64_t T>
__device__ __forceinline__ void decode_share(const uint32_t* words,
                                             float (&out)[Share<T>::kColumns]) {
  if constexpr (T == kFloat32) {
#pragma unroll
    for (int k = 0; k < 4; ++k) out[k] = __uint_as_float(words[k]);
  } else if constexpr (T == kFloat16) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      out[2 * k] = half_bits_to_float(words[k] & 0xffffu);
      out[2 * k + 1] = half_bits_to_float(words[k] >> 16);
    }
  } else if constexpr (T == kBFloat16) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      out[2 * k] = __uint_as_float(words[k] << 16);
      out[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
  } else if constexpr (T == kFloat8) {
#pragma unroll
    for (int k = 0; k < 4; ++k) float8s_to_floats(words[k], out + 4 * k);
  } else if constexpr (T == kInt8) {
#pragma unroll
    for (int k = 0; k < 4; ++k) bytes_to_floats(words[k], out + 4 * k);
  } else if constexpr (T == kBlockInt8) {
#pragma unroll
    for (int k = 0; k < 4; ++k) bytes_to_floats<128>(words[k], out + 4 * k);
  } else if constexpr (T == kInt4) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float even[4];
      float odd[4];
      bytes_to_floats(words[k] & 0x0f0f0f0fu, even);
      bytes_to_floats((words[k] >> 4) & 0x0f0f0f0fu, odd);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        out[8 * k + 2 * j] = even[j];
        out[8 * k + 2 * j + 1] = odd[j];
      }
    }
  } else {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(words);
#pragma unroll
    for (int k = 0; k < Share<T>::kColumns; ++k) out[k] = RowValues<T>::number(bytes, k);
  }
}

// One column of a row, for rows that are not aligned for shares.
__device__ __forceinline__ float decode_column(int64_t weight_type, const uint8_t* row,
                                               int64_t column) {
#define TESSERA_DECODE(type) \
  case type: return RowValues<type>::number(row, column);
  switch (static_cast<WeightType>(weight_type)) { TESSERA_WEIGHT_TYPES(TESSERA_DECODE) }
#undef TESSERA_DECODE
  return 0.0f;  // not a weight type
}

// The book's scale for a column of a kBlockInt8 row, of any alignment.
__device__ __forceinline__ float block_scale(const uint8_t* book, const uint8_t* row,
                                             int64_t column) {
  const uint8_t* block = row + column / kBlockColumns * kBlockColumns;
  const uint32_t word =
      block[0] | block[1] << 8 | block[2] << 16 | static_cast<uint32_t>(block[3]) << 24;
  return decode_column(kFloat32, book + 4 * block_code(word), 0);
}

// `scale` is what a value is multiplied by before it becomes e4m3.
__device__ __forceinline__ void store_element(OutType type, float scale, void* out, int64_t at,
                                              float value) {
  if (type == OutType::kFloat32) {
    static_cast<float*>(out)[at] = value;
  } else if (type == OutType::kFloat16) {
    static_cast<__half*>(out)[at] = __float2half_rn(value);
  } else if (type == OutType::kFloat8) {
    static_cast<uint8_t*>(out)[at] = static_cast<uint8_t>(narrow_fp8(value * scale, 0.0f));
  } else {
    static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(value);
  }
}

__device__ __forceinline__ uint32_t pack_pair(OutType type, float low, float high) {
  if (type == OutType::kFloat16) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Results are not read again by this kernel: keep the cache for rows.
__device__ __forceinline__ void store_streaming(void* at, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_streaming(void* at, uint32_t a) {
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(at), "r"(a) : "memory");
}

__device__ __forceinline__ void store_streaming(void* at, uint32_t a, uint32_t b) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(a), "r"(b) : "memory");
}

}  // namespace tessera
