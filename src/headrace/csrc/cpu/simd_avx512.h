// simd.h on AVX-512: one register.
#pragma once

#include <immintrin.h>

namespace headrace::cpu {

using Vec = __m512;
using IntVec = __m512i;

HEADRACE_INLINE __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>((1u << n) - 1);
}

HEADRACE_INLINE Vec zero() { return _mm512_setzero_ps(); }
HEADRACE_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
HEADRACE_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
HEADRACE_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
// The first n <= 16 elements, zeros after them; nothing else is touched.
HEADRACE_INLINE Vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
HEADRACE_INLINE void store_first(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

HEADRACE_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
HEADRACE_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
HEADRACE_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
HEADRACE_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
HEADRACE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
HEADRACE_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
HEADRACE_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
HEADRACE_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
HEADRACE_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
HEADRACE_INLINE Vec round(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// The size of a, the sign of b.
HEADRACE_INLINE Vec copy_sign(Vec a, Vec b) {
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000));
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(sign, _mm512_castps_si512(b), _mm512_castps_si512(a), 0xca));
}

// a < b ? yes : no
HEADRACE_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

// Lanes first <= lane < last of x, `other` elsewhere; 0 <= first, last <= 16.
HEADRACE_INLINE Vec keep_lanes(Vec x, int first, int last, Vec other) {
  const __mmask16 keep = first_lanes(last) & ~first_lanes(first);
  return _mm512_mask_blend_ps(keep, other, x);
}

HEADRACE_INLINE float reduce_add(Vec x) {
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

HEADRACE_INLINE float reduce_max(Vec x) {
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// -- integers

HEADRACE_INLINE IntVec set1_int(int32_t x) { return _mm512_set1_epi32(x); }
HEADRACE_INLINE IntVec to_int(Vec x) { return _mm512_cvtps_epi32(x); }  // to the nearest, ties to even
HEADRACE_INLINE Vec to_float(IntVec x) { return _mm512_cvtepi32_ps(x); }
HEADRACE_INLINE IntVec add(IntVec a, IntVec b) { return _mm512_add_epi32(a, b); }
HEADRACE_INLINE IntVec sub(IntVec a, IntVec b) { return _mm512_sub_epi32(a, b); }
template <int N>
HEADRACE_INLINE IntVec shift_left(IntVec x) { return _mm512_slli_epi32(x, N); }
template <int N>
HEADRACE_INLINE IntVec shift_right(IntVec x) { return _mm512_srai_epi32(x, N); }  // with the sign
HEADRACE_INLINE int32_t reduce_add(IntVec x) { return _mm512_reduce_add_epi32(x); }
HEADRACE_INLINE void store_int8(int8_t* p, IntVec x) {  // the low bytes
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

// 2^n of integers -126 <= n <= 127
HEADRACE_INLINE Vec power_of_2(Vec n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

// -- other formats in memory

HEADRACE_INLINE Vec load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// 32 values as 16 pairs: the first and the second of each pair.
HEADRACE_INLINE void load_bf16_pairs(const uint16_t* p, Vec& first, Vec& second) {
  const __m512i pairs = _mm512_loadu_si512(p);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second = _mm512_castsi512_ps(_mm512_and_epi32(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

#if defined(__AVX512BF16__)
// sums + both products of each pair; what is too small for a normal float32 counts as zero.
HEADRACE_INLINE Vec dot_bf16_pairs(Vec pairs, float pair, Vec sums) {
  const __m512bh x = reinterpret_cast<__m512bh>(_mm512_castps_si512(pairs));
  return _mm512_dpbf16_ps(sums, x, reinterpret_cast<__m512bh>(_mm512_castps_si512(_mm512_set1_ps(pair))));
}
HEADRACE_INLINE void store_bf16(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
#endif

HEADRACE_INLINE Vec load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// 16 numbers of e4m3, each divided by 256: a half float's exponent is 8 larger.
HEADRACE_INLINE Vec load_e4m3(const uint8_t* p) {
  const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(static_cast<short>(0xbf80))));
}

HEADRACE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace headrace::cpu
