// What the words of each integer format are on NEON: 4 inputs of 4 rows, a quarter of a strip's, in a register, as signed bytes.
//
// Q8_0 loses the 128 that it is packed with, Q4_0 is 16 (q - 8) and Q6_K 4 (q - 32): the integers of tiles.h, without an offset.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "formats.h"
#include "simd.h"

namespace headrace::cpu {

HEADRACE_INLINE uint8x16_t words_at(const uint8_t* p) { return vld1q_u8(p); }
HEADRACE_INLINE uint8x16_t masked(uint8x16_t x, uint8_t bits) { return vandq_u8(x, vdupq_n_u8(bits)); }
// From 128 too much, as bytes without a sign, to bytes with one.
HEADRACE_INLINE int8x16_t centred(uint8x16_t x) { return vreinterpretq_s8_u8(veorq_u8(x, vdupq_n_u8(0x80))); }

// Four numbers.
HEADRACE_INLINE float32x4_t halves_at(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
HEADRACE_INLINE uint8x8_t four_bytes(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return vreinterpret_u8_u32(vdup_n_u32(word));
}
HEADRACE_INLINE float32x4_t bytes_at(const uint8_t* p) {
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p)))));
}
HEADRACE_INLINE float32x4_t signed_bytes_at(const uint8_t* p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p))))));
}

// A block is the groups whose quants lie in the same words. At::next() goes on to the next block; `word` is 4 inputs of group
// PART of the block for one quarter of the rows; scale and minimum belong to that group (or to half HALF of it).
// NIBBLES_APART: words i and i + 4 are the nibbles of one.

struct Q8_0Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr bool MINIMUM = false;
  static constexpr bool NIBBLES_APART = false;

  struct At {
    size_t quants;
    size_t scales = 0;
    explicit At(int groups) : quants(scales_bytes(groups)) {}
    HEADRACE_INLINE void next() {
      quants += 512;
      scales += STRIP * 2;
    }
  };

  template <int PART>
  static HEADRACE_INLINE int8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    return centred(words_at(strip + at.quants + i * LINE + quarter * 16));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE float32x4_t scale(const uint8_t* strip, const At& at, int quarter) {
    return halves_at(strip + at.scales + quarter * 8);
  }
};

struct Q4_0Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr bool MINIMUM = false;
  static constexpr bool NIBBLES_APART = true;

  struct At {
    size_t quants;
    size_t scales = 0;
    explicit At(int groups) : quants(scales_bytes(groups)) {}
    HEADRACE_INLINE void next() {
      quants += 256;
      scales += STRIP * 2;
    }
  };

  template <int PART>
  static HEADRACE_INLINE int8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    const uint8x16_t v = words_at(strip + at.quants + i % 4 * LINE + quarter * 16);
    return centred(i < 4 ? vshlq_n_u8(v, 4) : masked(v, 0xf0));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE float32x4_t scale(const uint8_t* strip, const At& at, int quarter) {
    return vmulq_n_f32(halves_at(strip + at.scales + quarter * 8), 0.0625f);
  }
};

struct Q4_1Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr bool MINIMUM = true;
  static constexpr bool NIBBLES_APART = true;

  struct At {
    size_t quants = 0;
    explicit At(int) {}
    HEADRACE_INLINE void next() { quants += Q4_1_GROUP_BYTES; }
  };

  template <int PART>
  static HEADRACE_INLINE int8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    const uint8x16_t v = words_at(strip + at.quants + i % 4 * LINE + quarter * 16);
    return vreinterpretq_s8_u8(i < 4 ? masked(v, 0x0f) : vshrq_n_u8(v, 4));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE float32x4_t scale(const uint8_t* strip, const At& at, int quarter) {
    return halves_at(strip + at.quants + 256 + quarter * 8);
  }
  template <int PART>
  static HEADRACE_INLINE float32x4_t minimum(const uint8_t* strip, const At& at, int quarter) {
    return halves_at(strip + at.quants + 288 + quarter * 8);
  }
};

struct Q4_ZWeights : Q4_1Weights {
  template <int PART>
  static HEADRACE_INLINE float32x4_t minimum(const uint8_t* strip, const At& at, int quarter) {
    return vmulq_f32(Q4_1Weights::minimum<PART>(strip, at, quarter), scale<PART, 0>(strip, at, quarter));
  }
};

// Pairs of groups: low and high nibbles of eight words.
template <bool FIVE>
struct KWeights {
  static constexpr int BLOCK = 2;
  static constexpr int HALVES = 1;
  static constexpr int SUPER_BYTES = FIVE ? Q5_K_SUPER_BYTES : Q4_K_SUPER_BYTES;
  static constexpr int QUANTS = K_HEADER_BYTES + (FIVE ? 512 : 0);
  static constexpr bool MINIMUM = true;
  static constexpr bool NIBBLES_APART = false;

  struct At {
    size_t super = 0;
    size_t quants = QUANTS;
    size_t scales = 64;
    int pair = 0;
    explicit At(int) {}
    HEADRACE_INLINE void next() {
      quants += 512;
      scales += 2 * STRIP;
      pair++;
      if (pair == 4) {
        super += SUPER_BYTES;
        quants = super + QUANTS;
        scales = super + 64;
        pair = 0;
      }
    }
  };

  template <int PART>
  static HEADRACE_INLINE int8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    const uint8x16_t v = words_at(strip + at.quants + i * LINE + quarter * 16);
    uint8x16_t quants = PART == 0 ? masked(v, 0x0f) : vshrq_n_u8(v, 4);
    if constexpr (FIVE) {
      const uint8x16_t bit = vdupq_n_u8(static_cast<uint8_t>(1 << (2 * at.pair + PART)));
      const uint8x16_t has = vtstq_u8(words_at(strip + at.super + K_HEADER_BYTES + i * LINE + quarter * 16), bit);
      quants = vorrq_u8(quants, masked(has, 0x10));
    }
    return vreinterpretq_s8_u8(quants);
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE float32x4_t scale(const uint8_t* strip, const At& at, int quarter) {
    return vmulq_f32(bytes_at(strip + at.scales + PART * STRIP + quarter * 4), halves_at(strip + at.super + quarter * 8));
  }
  template <int PART>
  static HEADRACE_INLINE float32x4_t minimum(const uint8_t* strip, const At& at, int quarter) {
    const float32x4_t minima = bytes_at(strip + at.scales + 128 + PART * STRIP + quarter * 4);
    return vnegq_f32(vmulq_f32(minima, halves_at(strip + at.super + 32 + quarter * 8)));
  }
};

using Q4_KWeights = KWeights<false>;
using Q5_KWeights = KWeights<true>;

// Half a super-block: four groups in the nibbles of 16 words and the pairs of bits of 8; each group has two scales.
struct Q6_KWeights {
  static constexpr int BLOCK = 4;
  static constexpr int HALVES = 2;
  static constexpr bool MINIMUM = false;
  static constexpr bool NIBBLES_APART = false;

  struct At {
    size_t super = 0;
    size_t quants = K_HEADER_BYTES;
    size_t scales = 64;
    explicit At(int) {}
    HEADRACE_INLINE void next() {
      if (scales == super + 64) {
        quants += Q6_K_HALF_BYTES;
        scales += 8 * STRIP;
      } else {
        super += Q6_K_SUPER_BYTES;
        quants = super + K_HEADER_BYTES;
        scales = super + 64;
      }
    }
  };

  template <int PART>
  static HEADRACE_INLINE int8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    const uint8x16_t v = words_at(strip + at.quants + (PART % 2 * 8 + i) * LINE + quarter * 16);
    const uint8x16_t high = words_at(strip + at.quants + 1024 + i * LINE + quarter * 16);
    const uint8x16_t four = masked(PART < 2 ? vshlq_n_u8(v, 2) : vshrq_n_u8(v, 2), 0x3c);
    const uint8x16_t two = vshlq_n_u8(high, 6 - 2 * PART);
    return centred(vbslq_u8(vdupq_n_u8(0xc0), two, four));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE float32x4_t scale(const uint8_t* strip, const At& at, int quarter) {
    const float32x4_t quarter_step = vmulq_n_f32(halves_at(strip + at.super + quarter * 8), 0.25f);
    return vmulq_f32(signed_bytes_at(strip + at.scales + (2 * PART + HALF) * STRIP + quarter * 4), quarter_step);
  }
};

}  // namespace headrace::cpu
