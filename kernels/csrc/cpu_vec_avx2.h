// Eight floats in an AVX2 register.  Compile with -mavx2 -mfma -mf16c.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Vec {
  static constexpr int64_t kWidth = 8;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec set(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load_half(const uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Vec load_bfloat(const uint8_t* p) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
  }
  // The first and the second of kWidth pairs of bfloat16.
  static Vec load_even(const uint16_t* pairs) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))};
  }
  static Vec load_odd(const uint16_t* pairs) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(words, high))};
  }
  // e4m3fn read as an fp16 whose exponent is 8 too small.
  static Vec load_float8(const uint8_t* p) {
    const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
    const __m128i rest = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7);
    return {_mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), _mm256_set1_ps(256.0f))};
  }
  static Vec load_int8(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))};
  }
  static Vec load_int4(const uint8_t* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    const __m128i bytes = _mm_cvtsi32_si128(word);
    const __m128i mask = _mm_set1_epi8(0xf);
    const __m128i low = _mm_and_si128(bytes, mask);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store_half(uint16_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  void store_bfloat(uint16_t* p) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
    const __m128i low = _mm256_castsi256_si128(words);
    const __m128i high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
  }
};

// The nearest bfloat16, ties to even; a subnormal is zero, a NaN stays one.
inline Vec round_to_bfloat(Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  const __m256i tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  const __m256i flushed = _mm256_blendv_epi8(rounded, _mm256_and_si256(bits, sign), tiny);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_blendv_epi8(flushed, quiet, nan), high))};
}

inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec multiply(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec divide(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
// A NaN stays one: the second operand is taken where either is NaN.
inline Vec relu(Vec a) { return {_mm256_max_ps(_mm256_setzero_ps(), a.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }

// The sums of eight registers, in order, in one.
inline __m256 sum_eight(const Vec* a) {
  const __m256 s01 = _mm256_hadd_ps(a[0].v, a[1].v);
  const __m256 s23 = _mm256_hadd_ps(a[2].v, a[3].v);
  const __m256 s45 = _mm256_hadd_ps(a[4].v, a[5].v);
  const __m256 s67 = _mm256_hadd_ps(a[6].v, a[7].v);
  const __m256 s0123 = _mm256_hadd_ps(s01, s23);
  const __m256 s4567 = _mm256_hadd_ps(s45, s67);
  return _mm256_add_ps(_mm256_permute2f128_ps(s0123, s4567, 0x20),
                       _mm256_permute2f128_ps(s0123, s4567, 0x31));
}

// sums[k] = the sum of the elements of acc[k].
inline void sum_each(const Vec (&acc)[16], float* sums) {
  _mm256_storeu_ps(sums, sum_eight(acc));
  _mm256_storeu_ps(sums + 8, sum_eight(acc + 8));
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
  int32_t word;
  std::memcpy(&word, p, 4);
  const __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(word));
  *first = _mm_cvtss_f32(pair);
  *second = _mm_cvtss_f32(_mm_movehdup_ps(pair));
}

}  // namespace
