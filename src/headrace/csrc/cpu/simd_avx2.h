// simd.h on AVX2 with FMA: two registers.
#pragma once

#include <immintrin.h>

namespace headrace::cpu {

struct Vec {
  __m256 low, high;
};
struct IntVec {
  __m256i low, high;
};

// All bits set in lanes below n of eight.
HEADRACE_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

HEADRACE_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HEADRACE_INLINE Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HEADRACE_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HEADRACE_INLINE void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
// The first n <= 16 elements, zeros after them; nothing else is touched.
HEADRACE_INLINE Vec load_first(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
HEADRACE_INLINE void store_first(float* p, Vec x, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), x.low);
  _mm256_maskstore_ps(p + 8, first_lanes(n - 8), x.high);
}

HEADRACE_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
HEADRACE_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
HEADRACE_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
HEADRACE_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
HEADRACE_INLINE Vec fma(Vec a, Vec b, Vec c) {  // a b + c
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
HEADRACE_INLINE Vec fnma(Vec a, Vec b, Vec c) {  // c - a b
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
HEADRACE_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
HEADRACE_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
HEADRACE_INLINE Vec abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
HEADRACE_INLINE Vec round(Vec a) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, NEAREST), _mm256_round_ps(a.high, NEAREST)};
}

// The size of a, the sign of b.
HEADRACE_INLINE Vec copy_sign(Vec a, Vec b) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {
      _mm256_or_ps(_mm256_andnot_ps(sign, a.low), _mm256_and_ps(sign, b.low)),
      _mm256_or_ps(_mm256_andnot_ps(sign, a.high), _mm256_and_ps(sign, b.high)),
  };
}

// a < b ? yes : no
HEADRACE_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return {
      _mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
      _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)),
  };
}

// Lanes first <= lane < last of x, `other` elsewhere; 0 <= first, last <= 16.
HEADRACE_INLINE Vec keep_lanes(Vec x, int first, int last, Vec other) {
  const __m256i low = _mm256_andnot_si256(first_lanes(first), first_lanes(last));
  const __m256i high = _mm256_andnot_si256(first_lanes(first - 8), first_lanes(last - 8));
  return {
      _mm256_blendv_ps(other.low, x.low, _mm256_castsi256_ps(low)),
      _mm256_blendv_ps(other.high, x.high, _mm256_castsi256_ps(high)),
  };
}

HEADRACE_INLINE float reduce_add(Vec x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

HEADRACE_INLINE float reduce_max(Vec x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// -- integers

HEADRACE_INLINE IntVec set1_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
HEADRACE_INLINE IntVec to_int(Vec x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }  // ties to even
HEADRACE_INLINE Vec to_float(IntVec x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
HEADRACE_INLINE IntVec add(IntVec a, IntVec b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
HEADRACE_INLINE IntVec sub(IntVec a, IntVec b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
template <int N>
HEADRACE_INLINE IntVec shift_left(IntVec x) {
  return {_mm256_slli_epi32(x.low, N), _mm256_slli_epi32(x.high, N)};
}
template <int N>
HEADRACE_INLINE IntVec shift_right(IntVec x) {  // with the sign
  return {_mm256_srai_epi32(x.low, N), _mm256_srai_epi32(x.high, N)};
}
HEADRACE_INLINE int32_t reduce_add(IntVec x) {
  const __m256i eight = _mm256_add_epi32(x.low, x.high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
HEADRACE_INLINE void store_int8(int8_t* p, IntVec x) {  // the low bytes
  const __m256i pick = _mm256_setr_epi8(
      0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
      0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i low = _mm256_shuffle_epi8(x.low, pick);
  const __m256i high = _mm256_shuffle_epi8(x.high, pick);
  const __m128i first = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  const __m128i second = _mm_unpacklo_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi64(first, second));
}

// 2^n of integers -126 <= n <= 127
HEADRACE_INLINE Vec power_of_2(Vec n) {
  const IntVec bits = shift_left<23>(add(to_int(n), set1_int(127)));
  return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)};
}

// -- other formats in memory

HEADRACE_INLINE __m256 widen_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

HEADRACE_INLINE Vec load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }

// 32 values as 16 pairs: the first and the second of each pair.
HEADRACE_INLINE void load_bf16_pairs(const uint16_t* p, Vec& first, Vec& second) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))};
}

HEADRACE_INLINE Vec load_int8(const int8_t* p) {
  const __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)));
  return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
}

// 16 numbers of e4m3, each divided by 256: a half float's exponent is 8 larger.
HEADRACE_INLINE __m256 widen_e4m3(const uint8_t* p) {
  const __m128i bytes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(bytes, 7), _mm_set1_epi16(static_cast<short>(0xbf80))));
}

HEADRACE_INLINE Vec load_e4m3(const uint8_t* p) { return {widen_e4m3(p), widen_e4m3(p + 8)}; }

HEADRACE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace headrace::cpu
