// Tiles on NEON with the dot product of bytes: a strip is four registers. The integers and the order of the floats are those of the
// other instruction sets, so the bits are too. INT16 is two passes, high bytes and low bytes, with a shift between them.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "simd.h"
#include "tiles.h"
#include "weights_neon.h"

namespace headrace::cpu {

HEADRACE_INLINE int8x16_t four_inputs(const int8_t* p) {
  int word;
  std::memcpy(&word, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

// One panel's pointers, which go along with the groups.
template <int MR>
struct IntegerRows {
  const int8_t* ints;
  size_t plane;
  const float* scale;
  const float* scaled_sum;
  const int32_t* offset;
  const int32_t* half_offset;

  explicit IntegerRows(const Panel& panel)
      : ints(panel.ints),
        plane(static_cast<size_t>(panel.groups) * GROUP * MR),
        scale(panel.scale),
        scaled_sum(panel.scaled_sum),
        offset(panel.offset),
        half_offset(panel.half_offset) {}

  HEADRACE_INLINE void next() {
    ints += GROUP * MR;
    scale += MR;
    scaled_sum += MR;
    offset += MR;
    half_offset += 2 * MR;
  }
};

// Quarters [first, first + QUARTERS) of a strip.
template <class W, int PART, int HALF, int MR, int QUARTERS>
HEADRACE_INLINE void add_words(const uint8_t* strip, const typename W::At& at, int first, const int8_t* ints, int32x4_t (&sums)[MR][QUARTERS]) {
  constexpr int WORDS = 8 / W::HALVES;
  HEADRACE_UNROLL for (int i = HALF * WORDS; i < (HALF + 1) * WORDS; i++) {
    HEADRACE_UNROLL for (int q = 0; q < QUARTERS; q++) {
      const int8x16_t weights = vreinterpretq_s8_u8(W::template word<PART>(strip, at, i, first + q));
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        sums[m][q] = vdotq_s32(sums[m][q], weights, four_inputs(ints + (i * MR + m) * 4));
      }
    }
  }
}

template <class W, int PART, int HALF, int PLANES, int MR, int QUARTERS>
HEADRACE_INLINE void add_half(const uint8_t* strip, const typename W::At& at, int first, const IntegerRows<MR>& rows,
                              float32x4_t (&acc)[MR][QUARTERS]) {
  int32x4_t sums[MR][QUARTERS];
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int q = 0; q < QUARTERS; q++) {
      sums[m][q] = vdupq_n_s32(0);
    }
  }
  add_words<W, PART, HALF>(strip, at, first, rows.ints, sums);
  if constexpr (PLANES == 2) {
    HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
      HEADRACE_UNROLL for (int q = 0; q < QUARTERS; q++) {
        sums[m][q] = vshlq_n_s32(sums[m][q], 8);
      }
    }
    add_words<W, PART, HALF>(strip, at, first, rows.ints + rows.plane, sums);
  }
  const int32_t* offsets = W::HALVES == 1 ? rows.offset : rows.half_offset + HALF * MR;
  HEADRACE_UNROLL for (int q = 0; q < QUARTERS; q++) {
    const float32x4_t scale = W::template scale<PART, HALF>(strip, at, first + q);
    HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
      int32x4_t sum = vshlq_n_s32(sums[m][q], W::SHIFT);
      if constexpr (W::OFFSET) {
        sum = vaddq_s32(sum, vdupq_n_s32(offsets[m]));
      }
      acc[m][q] = vfmaq_f32(acc[m][q], vmulq_f32(vcvtq_f32_s32(sum), vdupq_n_f32(rows.scale[m])), scale);
    }
  }
}

template <class W, int PART, int PLANES, int MR, int QUARTERS>
HEADRACE_INLINE void add_groups(const uint8_t* strip, const typename W::At& at, int first, IntegerRows<MR>& rows,
                                float32x4_t (&acc)[MR][QUARTERS]) {
  add_half<W, PART, 0, PLANES>(strip, at, first, rows, acc);
  if constexpr (W::HALVES == 2) {
    add_half<W, PART, 1, PLANES>(strip, at, first, rows, acc);
  }
  if constexpr (W::MINIMUM) {
    HEADRACE_UNROLL for (int q = 0; q < QUARTERS; q++) {
      const float32x4_t minimum = W::template minimum<PART>(strip, at, first + q);
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        const float32x4_t sum = vdupq_n_f32(rows.scaled_sum[m]);
        acc[m][q] = W::SUBTRACTED ? vfmsq_f32(acc[m][q], minimum, sum) : vfmaq_f32(acc[m][q], minimum, sum);
      }
    }
  }
  rows.next();
  if constexpr (PART + 1 < W::BLOCK) {
    add_groups<W, PART + 1, PLANES>(strip, at, first, rows, acc);
  }
}

template <int MR, int QUARTERS>
HEADRACE_INLINE void clear(float32x4_t (&acc)[MR][QUARTERS]) {
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int q = 0; q < QUARTERS; q++) {
      acc[m][q] = vdupq_n_f32(0.0f);
    }
  }
}

template <int MR, int QUARTERS>
HEADRACE_INLINE void store_tile(const float32x4_t (&acc)[MR][QUARTERS], int first, float* out) {
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int q = 0; q < QUARTERS; q++) {
      vst1q_f32(out + m * STRIP + (first + q) * 4, acc[m][q]);
    }
  }
}

template <class W, int PLANES>
struct IntegerTile {
  template <int MR, int QUARTERS>
  static void run(const uint8_t* const* strips, const Panel& panel, float* out) {
    for (int first = 0; first < 4; first += QUARTERS) {
      float32x4_t acc[MR][QUARTERS];
      clear(acc);
      IntegerRows<MR> rows(panel);
      typename W::At at(panel.groups);
      for (int g = 0; g < panel.groups; g += W::BLOCK) {
        add_groups<W, 0, PLANES>(strips[0], at, first, rows, acc);
        at.next();
      }
      store_tile(acc, first, out);
    }
  }
};

struct F32Weights {
  static HEADRACE_INLINE float32x4_t load(const uint8_t* strip, int k, int quarter) {
    return vld1q_f32(reinterpret_cast<const float*>(strip + static_cast<size_t>(k) * 64 + quarter * 16));
  }
};

struct F16Weights {
  static HEADRACE_INLINE float32x4_t load(const uint8_t* strip, int k, int quarter) {
    return halves_at(strip + static_cast<size_t>(k) * 32 + quarter * 8);
  }
};

struct Bf16Weights {
  static HEADRACE_INLINE float32x4_t load(const uint8_t* strip, int k, int quarter) {
    const uint32x4_t pairs = vreinterpretq_u32_u8(words_at(strip + static_cast<size_t>(k / 2) * LINE + quarter * 16));
    return vreinterpretq_f32_u32(k % 2 == 0 ? vshlq_n_u32(pairs, 16) : vandq_u32(pairs, vdupq_n_u32(0xffff0000)));
  }
};

template <class W>
struct FloatTile {
  template <int MR, int QUARTERS>
  static void run(const uint8_t* const* strips, const Panel& panel, float* out) {
    for (int first = 0; first < 4; first += QUARTERS) {
      float32x4_t acc[MR][QUARTERS];
      clear(acc);
      for (int k = 0; k < panel.groups * GROUP; k += 2) {
        HEADRACE_UNROLL for (int i = 0; i < 2; i++) {
          HEADRACE_UNROLL for (int q = 0; q < QUARTERS; q++) {
            const float32x4_t weights = W::load(strips[0], k + i, first + q);
            HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
              acc[m][q] = vfmaq_n_f32(acc[m][q], weights, panel.f32[static_cast<size_t>(k + i) * MR + m]);
            }
          }
        }
      }
      store_tile(acc, first, out);
    }
  }
};

// By the rows of a panel: as much of a strip at a time as leaves registers for the sums.
template <class AnyTile>
Tile tile_of(int panel_rows) {
  switch (panel_rows) {
    case 1:
      return {AnyTile::template run<1, 4>, 1};
    case 2:
      return {AnyTile::template run<2, 4>, 1};
    case 3:
      return {AnyTile::template run<3, 4>, 1};
    case 4:
      return {AnyTile::template run<4, 2>, 1};
    default:
      return {AnyTile::template run<6, 2>, 1};
  }
}

template <class W>
Tile integer_tile_of(Rounding rounding, int panel_rows) {
  return rounding == Rounding::INT8 ? tile_of<IntegerTile<W, 1>>(panel_rows) : tile_of<IntegerTile<W, 2>>(panel_rows);
}

template <class W>
Tile float_tile_of(int panel_rows) {
  return tile_of<FloatTile<W>>(panel_rows);
}

inline Tile bf16_tile_of(int panel_rows) {
  return float_tile_of<Bf16Weights>(panel_rows);
}

}  // namespace headrace::cpu
