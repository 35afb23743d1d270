// The scalar "vector" of one float: the kernels' meaning without any instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Moving the exponent by multiplication also makes subnormal halves right.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (magnitude < 0x38800000u) {  // subnormal: let the adder round at 2^-24
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

struct Vec {
  static constexpr int64_t kWidth = 1;
  float v;

  static Vec zero() { return {0.0f}; }
  static Vec set(float x) { return {x}; }
  static Vec load(const float* p) { return {*p}; }
  static Vec load_half(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return {half_to_float(half)};
  }
  static Vec load_bfloat(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return {bits_to_float(static_cast<uint32_t>(half) << 16)};
  }
  // The first and the second of kWidth pairs of bfloat16.
  static Vec load_even(const uint16_t* pairs) {
    return {bits_to_float(static_cast<uint32_t>(pairs[0]) << 16)};
  }
  static Vec load_odd(const uint16_t* pairs) {
    return {bits_to_float(static_cast<uint32_t>(pairs[1]) << 16)};
  }
  // e4m3fn read as an fp16 whose exponent is 8 too small.
  static Vec load_float8(const uint8_t* p) {
    const uint32_t x = *p;
    return {half_to_float(static_cast<uint16_t>(((x & 0x80u) << 8) | ((x & 0x7fu) << 7))) * 256.0f};
  }
  static Vec load_int8(const uint8_t* p) { return {static_cast<float>(*p)}; }
  static Vec load_int4(const uint8_t* p) { return {static_cast<float>(*p & 0xf)}; }
  void store(float* p) const { *p = v; }
  void store_half(uint16_t* p) const { *p = float_to_half(v); }
  void store_bfloat(uint16_t* p) const { *p = float_to_bfloat(v); }
};

// The nearest bfloat16, ties to even; a subnormal is zero, a NaN stays one.
inline Vec round_to_bfloat(Vec a) {
  const uint32_t bits = float_to_bits(a.v);
  if ((bits & 0x7f800000u) == 0) return {bits_to_float(bits & 0x80000000u)};
  return {bits_to_float(static_cast<uint32_t>(float_to_bfloat(a.v)) << 16)};
}

inline Vec add(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec multiply(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec divide(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec relu(Vec a) { return {a.v < 0.0f ? 0.0f : a.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {std::fma(a.v, b.v, c.v)}; }

// sums[k] = the sum of the elements of acc[k].
inline void sum_each(const Vec (&acc)[16], float* sums) {
  for (int k = 0; k < 16; ++k) sums[k] = acc[k].v;
}

// Where a table's 16 scales are.
struct Book {
  const uint8_t* at;
};

inline Book load_book(const uint8_t* scales) { return {scales}; }

// scales[k] = the scale of the block that vector k of a row lies in, in every element.
template <int N>
inline void book_scales(const Book& book, const uint8_t* row, Vec (&scales)[N]) {
  for (int k = 0; k < N; ++k) {
    uint32_t word;
    std::memcpy(&word, row + k * Vec::kWidth / 16 * 16, 4);
    float scale;
    std::memcpy(&scale, book.at + 4 * (((word & 0x01010101u) * 0x10204080u) >> 28), 4);
    scales[k] = Vec::set(scale);
  }
}

inline void load_half_pair(const uint8_t* p, float* first, float* second) {
  uint16_t halves[2];
  std::memcpy(halves, p, 4);
  *first = half_to_float(halves[0]);
  *second = half_to_float(halves[1]);
}

}  // namespace
