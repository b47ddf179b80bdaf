// simd.h on NEON: four registers.
#pragma once

#include <arm_neon.h>

namespace headrace::cpu {

struct Vec {
  float32x4_t part[4];
};
struct IntVec {
  int32x4_t part[4];
};

template <class Out, class F>
HEADRACE_INLINE Out each_part(F f) {
  return {f(0), f(1), f(2), f(3)};
}

// All bits set in lanes first <= lane < last of 16, of register i.
HEADRACE_INLINE uint32x4_t lanes_between(int first, int last, int i) {
  const int32_t numbers[4] = {0, 1, 2, 3};
  const int32x4_t lane = vaddq_s32(vld1q_s32(numbers), vdupq_n_s32(4 * i));
  return vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcltq_s32(lane, vdupq_n_s32(last)));
}

HEADRACE_INLINE Vec set1(float x) {
  return each_part<Vec>([&](int) { return vdupq_n_f32(x); });
}
HEADRACE_INLINE Vec zero() { return set1(0.0f); }
HEADRACE_INLINE Vec load(const float* p) {
  return each_part<Vec>([&](int i) { return vld1q_f32(p + 4 * i); });
}
HEADRACE_INLINE void store(float* p, Vec x) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.part[i]);
}
// The first n <= 16 elements, zeros after them; nothing else is touched.
HEADRACE_INLINE Vec load_first(const float* p, int n) {
  float buffer[16] = {};
  for (int i = 0; i < n; i++) buffer[i] = p[i];
  return load(buffer);
}
HEADRACE_INLINE void store_first(float* p, Vec x, int n) {
  float buffer[16];
  store(buffer, x);
  for (int i = 0; i < n; i++) p[i] = buffer[i];
}

HEADRACE_INLINE Vec add(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
}
HEADRACE_INLINE Vec sub(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return vsubq_f32(a.part[i], b.part[i]); });
}
HEADRACE_INLINE Vec mul(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}
HEADRACE_INLINE Vec div(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return vdivq_f32(a.part[i], b.part[i]); });
}
HEADRACE_INLINE Vec fma(Vec a, Vec b, Vec c) {  // a b + c
  return each_part<Vec>([&](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
}
HEADRACE_INLINE Vec fnma(Vec a, Vec b, Vec c) {  // c - a b
  return each_part<Vec>([&](int i) { return vfmsq_f32(c.part[i], a.part[i], b.part[i]); });
}
HEADRACE_INLINE Vec max(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return vmaxq_f32(a.part[i], b.part[i]); });
}
HEADRACE_INLINE Vec min(Vec a, Vec b) {
  return each_part<Vec>([&](int i) { return vminq_f32(a.part[i], b.part[i]); });
}
HEADRACE_INLINE Vec abs(Vec a) {
  return each_part<Vec>([&](int i) { return vabsq_f32(a.part[i]); });
}
HEADRACE_INLINE Vec round(Vec a) {
  return each_part<Vec>([&](int i) { return vrndnq_f32(a.part[i]); });
}

// The size of a, the sign of b.
HEADRACE_INLINE Vec copy_sign(Vec a, Vec b) {
  const uint32x4_t sign = vdupq_n_u32(0x80000000);
  return each_part<Vec>([&](int i) { return vbslq_f32(sign, b.part[i], a.part[i]); });
}

// a < b ? yes : no
HEADRACE_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return each_part<Vec>([&](int i) { return vbslq_f32(vcltq_f32(a.part[i], b.part[i]), yes.part[i], no.part[i]); });
}

// Lanes first <= lane < last of x, `other` elsewhere; 0 <= first, last <= 16.
HEADRACE_INLINE Vec keep_lanes(Vec x, int first, int last, Vec other) {
  return each_part<Vec>([&](int i) { return vbslq_f32(lanes_between(first, last, i), x.part[i], other.part[i]); });
}

HEADRACE_INLINE float reduce_add(Vec x) {
  const float32x4_t low = vaddq_f32(x.part[0], x.part[2]);
  const float32x4_t four = vaddq_f32(low, vaddq_f32(x.part[1], x.part[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

HEADRACE_INLINE float reduce_max(Vec x) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.part[0], x.part[2]), vmaxq_f32(x.part[1], x.part[3])));
}

// -- integers

HEADRACE_INLINE IntVec set1_int(int32_t x) {
  return each_part<IntVec>([&](int) { return vdupq_n_s32(x); });
}
HEADRACE_INLINE IntVec to_int(Vec x) {  // to the nearest, ties to even
  return each_part<IntVec>([&](int i) { return vcvtnq_s32_f32(x.part[i]); });
}
HEADRACE_INLINE Vec to_float(IntVec x) {
  return each_part<Vec>([&](int i) { return vcvtq_f32_s32(x.part[i]); });
}
HEADRACE_INLINE IntVec add(IntVec a, IntVec b) {
  return each_part<IntVec>([&](int i) { return vaddq_s32(a.part[i], b.part[i]); });
}
HEADRACE_INLINE IntVec sub(IntVec a, IntVec b) {
  return each_part<IntVec>([&](int i) { return vsubq_s32(a.part[i], b.part[i]); });
}
template <int N>
HEADRACE_INLINE IntVec shift_left(IntVec x) {
  return each_part<IntVec>([&](int i) { return vshlq_n_s32(x.part[i], N); });
}
template <int N>
HEADRACE_INLINE IntVec shift_right(IntVec x) {  // with the sign
  return each_part<IntVec>([&](int i) { return vshrq_n_s32(x.part[i], N); });
}
HEADRACE_INLINE int32_t reduce_add(IntVec x) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(x.part[0], x.part[1]), vaddq_s32(x.part[2], x.part[3])));
}
HEADRACE_INLINE void store_int8(int8_t* p, IntVec x) {  // the low bytes
  const int16x8_t low = vcombine_s16(vmovn_s32(x.part[0]), vmovn_s32(x.part[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(x.part[2]), vmovn_s32(x.part[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

// 2^n of integers -126 <= n <= 127
HEADRACE_INLINE Vec power_of_2(Vec n) {
  const IntVec bits = shift_left<23>(add(to_int(n), set1_int(127)));
  return each_part<Vec>([&](int i) { return vreinterpretq_f32_s32(bits.part[i]); });
}

// -- other formats in memory

HEADRACE_INLINE Vec load_bf16(const uint16_t* p) {
  return each_part<Vec>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}

// 32 values as 16 pairs: the first and the second of each pair.
HEADRACE_INLINE void load_bf16_pairs(const uint16_t* p, Vec& first, Vec& second) {
  const uint32x4_t upper = vdupq_n_u32(0xffff0000);
  for (int i = 0; i < 4; i++) {
    const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
    first.part[i] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    second.part[i] = vreinterpretq_f32_u32(vandq_u32(pairs, upper));
  }
}

HEADRACE_INLINE Vec load_int8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes));
  const int16x8_t high = vmovl_s8(vget_high_s8(bytes));
  return {
      vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
      vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
      vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
      vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))),
  };
}

// 16 numbers of e4m3, each divided by 256: a half float's exponent is 8 larger.
HEADRACE_INLINE Vec load_e4m3(const uint8_t* p) {
  const int8x16_t bytes = vld1q_s8(reinterpret_cast<const int8_t*>(p));
  const int16x8_t kept = vdupq_n_s16(static_cast<int16_t>(0xbf80));
  const float16x8_t low = vreinterpretq_f16_s16(vandq_s16(vshll_n_s8(vget_low_s8(bytes), 7), kept));
  const float16x8_t high = vreinterpretq_f16_s16(vandq_s16(vshll_n_s8(vget_high_s8(bytes), 7), kept));
  return {
      vcvt_f32_f16(vget_low_f16(low)),
      vcvt_f32_f16(vget_high_f16(low)),
      vcvt_f32_f16(vget_low_f16(high)),
      vcvt_f32_f16(vget_high_f16(high)),
  };
}

HEADRACE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace headrace::cpu
