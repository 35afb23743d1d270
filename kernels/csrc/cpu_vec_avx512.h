// Sixteen floats in an AVX-512 register.  Compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Vec {
  static constexpr int64_t kWidth = 16;
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load_half(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Vec load_bfloat(const uint8_t* p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
  }
  // The first and the second of kWidth pairs of bfloat16.
  static Vec load_even(const uint16_t* pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16))};
  }
  static Vec load_odd(const uint16_t* pairs) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), high))};
  }
  // e4m3fn read as an fp16 whose exponent is 8 too small.
  static Vec load_float8(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i x = _mm256_cvtepu8_epi16(bytes);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
    return {_mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0f))};
  }
  static Vec load_int8(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
  }
  static Vec load_int4(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i mask = _mm_set1_epi8(0xf);
    const __m128i low = _mm_and_si128(bytes, mask);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_half(uint16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  void store_bfloat(uint16_t* p) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet)));
  }
};

// The nearest bfloat16, ties to even; a subnormal is zero, a NaN stays one.
inline Vec round_to_bfloat(Vec a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  rounded = _mm512_mask_and_epi32(rounded, tiny, bits, sign);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return {_mm512_castsi512_ps(_mm512_and_si512(rounded, high))};
}

inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec multiply(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec divide(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
// A NaN stays one: the second operand is taken where either is NaN.
inline Vec relu(Vec a) { return {_mm512_max_ps(_mm512_setzero_ps(), a.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

// Adds halves of two registers so that each 128-bit quarter of the result sums pairs of quarters.
inline __m512 fold_quarters(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Within each quarter: element 0..3 = the quarter-sums of a, b, c, d.
inline __m512 sum_four(const Vec* a) {
  const __m512 t01 =
      _mm512_add_ps(_mm512_unpacklo_ps(a[0].v, a[1].v), _mm512_unpackhi_ps(a[0].v, a[1].v));
  const __m512 t23 =
      _mm512_add_ps(_mm512_unpacklo_ps(a[2].v, a[3].v), _mm512_unpackhi_ps(a[2].v, a[3].v));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(t01), _mm512_castps_pd(t23));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(t01), _mm512_castps_pd(t23));
  return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

// sums[k] = the sum of the elements of acc[k].
inline void sum_each(const Vec (&acc)[16], float* sums) {
  const __m512 first = fold_quarters(sum_four(acc), sum_four(acc + 4));
  const __m512 second = fold_quarters(sum_four(acc + 8), sum_four(acc + 12));
  _mm512_storeu_ps(sums, fold_quarters(first, second));
}

// A table's 16 scales, all in one register.
struct Book {
  __m512 v;
};

inline Book load_book(const uint8_t* scales) { return {_mm512_loadu_ps(scales)}; }

// scales[k] = the scale of block k of a row, in every element.  Four blocks at a time: each one's
// code ends up in the block's first element, which picks a scale and is then spread.
template <int N>
inline void book_scales(const Book& book, const uint8_t* row, Vec (&scales)[N]) {
  for (int k = 0; k < N; k += 4) {
    const __mmask16 whole = N - k >= 4 ? 0xffff : static_cast<__mmask16>((1 << (4 * (N - k))) - 1);
    const __m512i words = _mm512_maskz_loadu_epi32(whole, row + 16 * k);
    const __m512i bits = _mm512_and_si512(words, _mm512_set1_epi32(0x01010101));
    const __m512i codes =
        _mm512_srli_epi32(_mm512_mullo_epi32(bits, _mm512_set1_epi32(0x10204080)), 28);
    const __m512 chosen = _mm512_permutexvar_ps(codes, book.v);
    for (int j = 0; j < 4 && k + j < N; ++j) {
      scales[k + j] = {_mm512_permutexvar_ps(_mm512_set1_epi32(4 * j), chosen)};
    }
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
