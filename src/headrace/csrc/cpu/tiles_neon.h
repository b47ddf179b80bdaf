// Tiles on NEON with dot products of signed bytes, or (i8mm) products of two rows with two lanes: the integers and the order of the
// floats are those of the other instruction sets, so the bits are too.
//
// A strip is four registers. Its sums are as many again, so a tile takes a whole strip or a half at a time, as the 32 registers
// allow. INT16 is two passes, high bytes and low bytes, with a shift between them. bfloat16 weights are widened: exact.
#pragma once

#include <arm_neon.h>

#include <cstring>
#include <type_traits>

#include "simd.h"
#include "tiles.h"
#include "weights_neon.h"

namespace headrace::cpu {

// -- integer products

// One panel's pointers, which go along with the groups.
template <int MR>
struct IntegerRows {
  const int8_t* ints;
  size_t plane;
  const float* scale;
  const float* scaled_sum;

  explicit IntegerRows(const Panel& panel)
      : ints(panel.ints),
        plane(static_cast<size_t>(panel.groups) * GROUP * MR),
        scale(panel.scale),
        scaled_sum(panel.scaled_sum) {}

  HEADRACE_INLINE void next() {
    ints += GROUP * MR;
    scale += MR;
    scaled_sum += MR;
  }
};

// The lanes that a tile works on: N registers, Q of each strip, from quarter `first` of it on.
template <int N, int Q>
struct Lanes {
  const uint8_t* strips[N / Q];
  int first;

  HEADRACE_INLINE const uint8_t* strip(int n) const { return strips[n / Q]; }
  HEADRACE_INLINE int quarter(int n) const { return first + n % Q; }
  // The same, but the compiler does not know: it loads words again rather than keep them, for which there are not the registers.
  HEADRACE_INLINE Lanes anew() const {
    Lanes lanes = *this;
    HEADRACE_UNROLL for (int i = 0; i < N / Q; i++) {
      asm volatile("" : "+r"(lanes.strips[i]) : : "memory");
    }
    return lanes;
  }
};

// In which order the words of a group are read, TOGETHER of them at once: those that are nibbles of the same word after each other.
template <class W, int TOGETHER>
constexpr int word_at(int step) {
  return W::NIBBLES_APART ? step / (2 * TOGETHER) * TOGETHER + step % TOGETHER + step / TOGETHER % 2 * 4 : step;
}

// As vdotq wants the rows: sums[m][n] is row m.
struct Dots {
  static HEADRACE_INLINE int8x16_t inputs(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
  }

  template <class W, int PART, int HALF, int MR, int N, int Q>
  static HEADRACE_INLINE void add(const Lanes<N, Q>& lanes, const typename W::At& at, const int8_t* ints, int32x4_t (&sums)[MR][N]) {
    constexpr int WORDS = 8 / W::HALVES;
    HEADRACE_UNROLL for (int step = HALF * WORDS; step < (HALF + 1) * WORDS; step++) {
      const int i = word_at<W, 1>(step);
      int8x16_t weights[N];
      HEADRACE_UNROLL for (int n = 0; n < N; n++) {
        weights[n] = W::template word<PART>(lanes.strip(n), at, i, lanes.quarter(n));
      }
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        const int8x16_t x = inputs(ints + (i * MR + m) * 4);
        HEADRACE_UNROLL for (int n = 0; n < N; n++) {
          sums[m][n] = vdotq_s32(sums[m][n], weights[n], x);
        }
      }
    }
  }

  template <int MR, int N>
  static HEADRACE_INLINE void to_rows(int32x4_t (&)[MR][N]) {}
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
// As vmmlaq wants pairs of rows: sums[m][n] and sums[m + 1][n] are rows m and m + 1 of the first and the last two lanes.
struct Squares {
  static HEADRACE_INLINE int32x4_t zip_low(int8x16_t a, int8x16_t b) {
    return vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b));
  }
  static HEADRACE_INLINE int32x4_t zip_high(int8x16_t a, int8x16_t b) {
    return vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b));
  }
  // Eight inputs of two rows, whose words lie `stride` bytes apart.
  static HEADRACE_INLINE int8x16_t inputs(const int8_t* p, int stride) {
    const int8x8_t none = vdup_n_s8(0);
    return vreinterpretq_s8_s32(zip_low(vcombine_s8(vld1_s8(p), none), vcombine_s8(vld1_s8(p + stride), none)));
  }

  template <class W, int PART, int HALF, int MR, int N, int Q>
  static HEADRACE_INLINE void add(const Lanes<N, Q>& lanes, const typename W::At& at, const int8_t* ints, int32x4_t (&sums)[MR][N]) {
    constexpr int WORDS = 8 / W::HALVES;
    HEADRACE_UNROLL for (int step = HALF * WORDS; step < (HALF + 1) * WORDS; step += 2) {
      const int i = word_at<W, 2>(step);
      int8x16_t low[N];
      int8x16_t high[N];
      HEADRACE_UNROLL for (int n = 0; n < N; n++) {
        const int8x16_t even = W::template word<PART>(lanes.strip(n), at, i, lanes.quarter(n));
        const int8x16_t odd = W::template word<PART>(lanes.strip(n), at, i + 1, lanes.quarter(n));
        low[n] = vreinterpretq_s8_s32(zip_low(even, odd));
        high[n] = vreinterpretq_s8_s32(zip_high(even, odd));
      }
      HEADRACE_UNROLL for (int m = 0; m < MR; m += 2) {
        const int8x16_t x = inputs(ints + (i * MR + m) * 4, MR * 4);
        HEADRACE_UNROLL for (int n = 0; n < N; n++) {
          sums[m][n] = vmmlaq_s32(sums[m][n], x, low[n]);
          sums[m + 1][n] = vmmlaq_s32(sums[m + 1][n], x, high[n]);
        }
      }
    }
  }

  template <int MR, int N>
  static HEADRACE_INLINE void to_rows(int32x4_t (&sums)[MR][N]) {
    HEADRACE_UNROLL for (int m = 0; m < MR; m += 2) {
      HEADRACE_UNROLL for (int n = 0; n < N; n++) {
        const int64x2_t first = vreinterpretq_s64_s32(sums[m][n]);
        const int64x2_t last = vreinterpretq_s64_s32(sums[m + 1][n]);
        sums[m][n] = vreinterpretq_s32_s64(vzip1q_s64(first, last));
        sums[m + 1][n] = vreinterpretq_s32_s64(vzip2q_s64(first, last));
      }
    }
  }
};

template <int MR>
using Products = std::conditional_t<MR % 2 == 0, Squares, Dots>;
#else
template <int MR>
using Products = Dots;
#endif

template <int MR, int N>
HEADRACE_INLINE void clear(int32x4_t (&sums)[MR][N]) {
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < N; n++) {
      sums[m][n] = vdupq_n_s32(0);
    }
  }
}

// The integer sums of a group, or of half of one.
template <class W, int PART, int HALF, Rounding R, int MR, int N, int Q>
HEADRACE_INLINE void sum_group(const Lanes<N, Q>& lanes, const typename W::At& at, const IntegerRows<MR>& rows, int32x4_t (&sums)[MR][N]) {
  clear(sums);
  Products<MR>::template add<W, PART, HALF>(lanes.anew(), at, rows.ints, sums);
  if constexpr (R == Rounding::INT16) {
    HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
      HEADRACE_UNROLL for (int n = 0; n < N; n++) {
        sums[m][n] = vshlq_n_s32(sums[m][n], 8);
      }
    }
    Products<MR>::template add<W, PART, HALF>(lanes.anew(), at, rows.ints + rows.plane, sums);
  }
  Products<MR>::to_rows(sums);
}

template <class W, int PART, int HALF, Rounding R, int MR, int N, int Q>
HEADRACE_INLINE void add_half(const Lanes<N, Q>& lanes, const typename W::At& at, const IntegerRows<MR>& rows, float32x4_t (&acc)[MR][N]) {
  int32x4_t sums[MR][N];
  sum_group<W, PART, HALF, R>(lanes, at, rows, sums);
  HEADRACE_UNROLL for (int n = 0; n < N; n++) {
    const float32x4_t scale = W::template scale<PART, HALF>(lanes.strip(n), at, lanes.quarter(n));
    HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
      acc[m][n] = vfmaq_f32(acc[m][n], vmulq_n_f32(vcvtq_f32_s32(sums[m][n]), rows.scale[m]), scale);
    }
  }
}

template <class W, int PART, Rounding R, int MR, int N, int Q>
HEADRACE_INLINE void add_groups(const Lanes<N, Q>& lanes, const typename W::At& at, IntegerRows<MR>& rows, float32x4_t (&acc)[MR][N]) {
  add_half<W, PART, 0, R>(lanes, at, rows, acc);
  if constexpr (W::HALVES == 2) {
    add_half<W, PART, 1, R>(lanes, at, rows, acc);
  }
  if constexpr (W::MINIMUM) {
    HEADRACE_UNROLL for (int n = 0; n < N; n++) {
      const float32x4_t minimum = W::template minimum<PART>(lanes.strip(n), at, lanes.quarter(n));
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        acc[m][n] = vfmaq_n_f32(acc[m][n], minimum, rows.scaled_sum[m]);
      }
    }
  }
  rows.next();
  if constexpr (PART + 1 < W::BLOCK) {
    add_groups<W, PART + 1, R>(lanes, at, rows, acc);
  }
}

template <int MR, int N>
HEADRACE_INLINE void clear(float32x4_t (&acc)[MR][N]) {
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < N; n++) {
      acc[m][n] = vdupq_n_f32(0.0f);
    }
  }
}

template <int Q, int MR, int N>
HEADRACE_INLINE void store_tile(const float32x4_t (&acc)[MR][N], int first, float* out) {
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < N; n++) {
      vst1q_f32(out + (m * (N / Q) + n / Q) * STRIP + (first + n % Q) * 4, acc[m][n]);
    }
  }
}

template <class W, Rounding R>
struct IntegerTile {
  template <int MR, int NR>
  static void run(const uint8_t* const* all, const Panel& panel, float* out) {
    constexpr int Q = MR * NR <= 3 ? 4 : 2;
    constexpr int N = NR * Q;
    Lanes<N, Q> lanes;
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      lanes.strips[n] = all[n];
    }
    for (lanes.first = 0; lanes.first < 4; lanes.first += Q) {
      float32x4_t acc[MR][N];
      clear(acc);
      IntegerRows<MR> rows(panel);
      typename W::At at(panel.groups);
      for (int g = 0; g < panel.groups; g += W::BLOCK) {
        add_groups<W, 0, R>(lanes, at, rows, acc);
        at.next();
      }
      store_tile<Q>(acc, lanes.first, out);
    }
  }
};

// -- float products, whole strips

struct F32Weights {
  static constexpr int BYTES = 64;  // of an input
  // Input ODD (0 or 1) of two, of a quarter of the rows.
  template <int ODD>
  static HEADRACE_INLINE float32x4_t load(const uint8_t* p, int quarter) {
    return vreinterpretq_f32_u8(vld1q_u8(p + ODD * 64 + quarter * 16));
  }
};

struct F16Weights {
  static constexpr int BYTES = 32;
  template <int ODD>
  static HEADRACE_INLINE float32x4_t load(const uint8_t* p, int quarter) {
    return halves_at(p + ODD * 32 + quarter * 8);
  }
};

struct Bf16Weights {
  static constexpr int BYTES = 32;
  template <int ODD>
  static HEADRACE_INLINE float32x4_t load(const uint8_t* p, int quarter) {
    const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(p + quarter * 16));
    return vreinterpretq_f32_u32(ODD ? vandq_u32(pairs, vdupq_n_u32(0xffff0000)) : vshlq_n_u32(pairs, 16));
  }
};

template <class W, int ODD, int MR, int N>
HEADRACE_INLINE void add_input(const uint8_t* const (&strips)[N / 4], size_t at, const float* x, float32x4_t (&acc)[MR][N]) {
  float32x4_t weights[N];
  HEADRACE_UNROLL for (int n = 0; n < N; n++) {
    weights[n] = W::template load<ODD>(strips[n / 4] + at, n % 4);
  }
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < N; n++) {
      acc[m][n] = vfmaq_n_f32(acc[m][n], weights[n], x[m]);
    }
  }
}

template <class W>
struct FloatTile {
  template <int MR, int NR>
  static void run(const uint8_t* const* all, const Panel& panel, float* out) {
    const uint8_t* strips[NR];
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      strips[n] = all[n];
    }
    float32x4_t acc[MR][NR * 4];
    clear(acc);
    const float* x = panel.f32;
    size_t at = 0;
    for (int pair = 0; pair < panel.groups * GROUP / 2; pair++) {
      add_input<W, 0>(strips, at, x, acc);
      add_input<W, 1>(strips, at, x + MR, acc);
      at += 2 * W::BYTES;
      x += 2 * MR;
    }
    store_tile<4>(acc, 0, out);
  }
};

// By the rows of a panel: as many strips as leave registers for the sums.
template <class AnyTile>
Tile tile_of(int panel_rows) {
  switch (panel_rows) {
    case 1:
      return {AnyTile::template run<1, 2>, 2};
    case 2:
      return {AnyTile::template run<2, 1>, 1};
    case 3:
      return {AnyTile::template run<3, 1>, 1};
    case 4:
      return {AnyTile::template run<4, 1>, 1};
    default:
      return {AnyTile::template run<6, 1>, 1};
  }
}

template <class W>
Tile integer_tile_of(Rounding rounding, int panel_rows) {
  return rounding == Rounding::INT8 ? tile_of<IntegerTile<W, Rounding::INT8>>(panel_rows)
                                    : tile_of<IntegerTile<W, Rounding::INT16>>(panel_rows);
}

template <class W>
Tile float_tile_of(int panel_rows) {
  return tile_of<FloatTile<W>>(panel_rows);
}

inline Tile bf16_tile_of(int panel_rows) {
  return float_tile_of<Bf16Weights>(panel_rows);
}

}  // namespace headrace::cpu
