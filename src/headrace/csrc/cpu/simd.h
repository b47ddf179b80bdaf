// Sixteen floats at a time: what everything outside of the product tiles is written on.
//
// Every instruction set has the same operations with the same rounding, reductions add in the same tree, and a fused
// multiply-add is where it is written (-ffp-contract=off): all of them give the same bits.
//
// Where an operand is NaN, max(a, b) and min(a, b) give b (or NaN); in the order of the operands below a NaN goes on.
#pragma once

#include <cstdint>
#include <cstring>

#define HEADRACE_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define HEADRACE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define HEADRACE_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#error "the native step needs AVX2 or NEON"
#endif

namespace headrace::cpu {

inline constexpr int LANES = 16;

template <class T>
HEADRACE_INLINE T round_up(T n, T multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

HEADRACE_INLINE float bf16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// To the nearest, ties to even; a NaN stays one.
HEADRACE_INLINE uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
}

// e^x to about 1e-7 of itself; 1.2e-38 below -87.3, and at most 2^127 (above 88.03).
HEADRACE_INLINE Vec exp(Vec x) {
  x = max(set1(-87.3f), min(set1(88.02f), x));
  const Vec n = round(mul(x, set1(1.44269504f)));
  Vec r = fnma(n, set1(0.693359375f), x);
  r = fnma(n, set1(-2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return mul(add(fma(mul(r, r), p, r), set1(1.0f)), power_of_2(n));
}

// 1 / (1 + e^-x)
HEADRACE_INLINE Vec sigmoid(Vec x) {
  return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x))));
}

// To about 1e-7 of itself: a polynomial near 0, from e^2|x| elsewhere.
HEADRACE_INLINE Vec tanh(Vec x) {
  const Vec size = abs(x);
  const Vec z = mul(x, x);
  Vec p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const Vec near = fma(mul(p, z), x, x);
  const Vec far = sub(set1(1.0f), div(set1(2.0f), add(exp(add(size, size)), set1(1.0f))));
  return select_less(size, set1(0.625f), near, copy_sign(far, x));
}

// 1 - erf(x) for x >= 0, to about 3e-7 (a Chebyshev fit of its logarithm; Press et al., Numerical Recipes).
HEADRACE_INLINE Vec erfc(Vec x) {
  const Vec t = div(set1(1.0f), fma(x, set1(0.5f), set1(1.0f)));
  Vec p = set1(0.17087277f);
  p = fma(p, t, set1(-0.82215223f));
  p = fma(p, t, set1(1.48851587f));
  p = fma(p, t, set1(-1.13520398f));
  p = fma(p, t, set1(0.27886807f));
  p = fma(p, t, set1(-0.18628806f));
  p = fma(p, t, set1(0.09678418f));
  p = fma(p, t, set1(0.37409196f));
  p = fma(p, t, set1(1.00002368f));
  p = fma(p, t, set1(-1.26551223f));
  return mul(t, exp(fnma(x, x, p)));
}

}  // namespace headrace::cpu
