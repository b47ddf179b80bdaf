// What the words of each integer format are on NEON: 4 inputs of 4 rows, a quarter of a strip, in a register.
#pragma once

#include <arm_neon.h>

#include "formats.h"
#include "simd.h"

namespace headrace::cpu {

HEADRACE_INLINE uint8x16_t words_at(const uint8_t* p) { return vld1q_u8(p); }
HEADRACE_INLINE float32x4_t halves_at(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
HEADRACE_INLINE uint8x8_t four_bytes_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return vreinterpret_u8_u32(vdup_n_u32(word));
}
HEADRACE_INLINE float32x4_t bytes_at(const uint8_t* p) { return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes_at(p))))); }
HEADRACE_INLINE float32x4_t signed_bytes_at(const uint8_t* p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes_at(p))))));
}

// A block is the groups whose quants lie in the same words. At::next() goes on to the next block, At::stream() is how far the
// strip is read; `word` is 4 inputs of group PART of the block, as bytes below 128 or (Q8_0) signed ones; scale and minimum belong to
// that group (or to half HALF of it). SHIFT: the sum counts so many bits more, and OFFSET: it gets Panel::offset then.

struct Q8_0Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr int BLOCK_BYTES = 512;
  static constexpr int SHIFT = 0;
  static constexpr bool OFFSET = false;
  static constexpr bool MINIMUM = false;

  struct At {
    size_t quants, scales;
    explicit At(int groups) : quants(scales_bytes(groups)), scales(0) {}
    HEADRACE_INLINE size_t stream() const { return quants; }
    HEADRACE_INLINE void next() {
      quants += 512;
      scales += STRIP * 2;
    }
  };

  template <int PART>
  static HEADRACE_INLINE uint8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    return veorq_u8(words_at(strip + at.quants + i * LINE + quarter * 16), vdupq_n_u8(0x80));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE float32x4_t scale(const uint8_t* strip, const At& at, int quarter) {
    return halves_at(strip + at.scales + quarter * 8);
  }
};

struct Q4_0Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr int BLOCK_BYTES = 256;
  static constexpr int SHIFT = 4;
  static constexpr bool OFFSET = true;
  static constexpr bool MINIMUM = false;

  struct At {
    size_t quants, scales;
    explicit At(int groups) : quants(scales_bytes(groups)), scales(0) {}
    HEADRACE_INLINE size_t stream() const { return quants; }
    HEADRACE_INLINE void next() {
      quants += 256;
      scales += STRIP * 2;
    }
  };

  template <int PART>
  static HEADRACE_INLINE uint8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    const uint8x16_t v = words_at(strip + at.quants + i % 4 * LINE + quarter * 16);
    return i < 4 ? vandq_u8(v, vdupq_n_u8(15)) : vshrq_n_u8(v, 4);
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE float32x4_t scale(const uint8_t* strip, const At& at, int quarter) {
    return vmulq_f32(halves_at(strip + at.scales + quarter * 8), vdupq_n_f32(0.0625f));
  }
};

struct Q4_1Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr int BLOCK_BYTES = Q4_1_GROUP_BYTES;
  static constexpr int SHIFT = 0;
  static constexpr bool OFFSET = false;
  static constexpr bool MINIMUM = true;
  static constexpr bool SUBTRACTED = false;

  struct At {
    size_t quants = 0;
    explicit At(int) {}
    HEADRACE_INLINE size_t stream() const { return quants; }
    HEADRACE_INLINE void next() { quants += Q4_1_GROUP_BYTES; }
  };

  template <int PART>
  static HEADRACE_INLINE uint8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    const uint8x16_t v = words_at(strip + at.quants + i % 4 * LINE + quarter * 16);
    return i < 4 ? vandq_u8(v, vdupq_n_u8(15)) : vshrq_n_u8(v, 4);
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

// Pairs of groups: low and high nibbles of eight words.
template <bool FIVE>
struct KWeights {
  static constexpr int BLOCK = 2;
  static constexpr int HALVES = 1;
  static constexpr int SUPER_BYTES = FIVE ? Q5_K_SUPER_BYTES : Q4_K_SUPER_BYTES;
  static constexpr int QUANTS = K_HEADER_BYTES + (FIVE ? 512 : 0);
  static constexpr int BLOCK_BYTES = SUPER_BYTES / 4;
  static constexpr int SHIFT = 0;
  static constexpr bool OFFSET = false;
  static constexpr bool MINIMUM = true;
  static constexpr bool SUBTRACTED = true;  // the minimum

  struct At {
    size_t super = 0;
    size_t quants = QUANTS;
    size_t scales = 64;
    int pair = 0;
    explicit At(int) {}
    HEADRACE_INLINE size_t stream() const { return super + pair * BLOCK_BYTES; }
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
  static HEADRACE_INLINE uint8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    const uint8x16_t v = words_at(strip + at.quants + i * LINE + quarter * 16);
    const uint8x16_t nibbles = PART == 0 ? vandq_u8(v, vdupq_n_u8(15)) : vshrq_n_u8(v, 4);
    if constexpr (!FIVE) {
      return nibbles;
    } else {
      const uint8x16_t bit = vdupq_n_u8(static_cast<uint8_t>(1 << (2 * at.pair + PART)));
      const uint8x16_t bits = words_at(strip + at.super + K_HEADER_BYTES + i * LINE + quarter * 16);
      return vorrq_u8(nibbles, vandq_u8(vtstq_u8(bits, bit), vdupq_n_u8(16)));
    }
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE float32x4_t scale(const uint8_t* strip, const At& at, int quarter) {
    return vmulq_f32(bytes_at(strip + at.scales + PART * STRIP + quarter * 4), halves_at(strip + at.super + quarter * 8));
  }
  template <int PART>
  static HEADRACE_INLINE float32x4_t minimum(const uint8_t* strip, const At& at, int quarter) {
    return vmulq_f32(bytes_at(strip + at.scales + 128 + PART * STRIP + quarter * 4), halves_at(strip + at.super + 32 + quarter * 8));
  }
};

using Q4_KWeights = KWeights<false>;
using Q5_KWeights = KWeights<true>;

// Half a super-block: four groups in the nibbles of 16 words and the pairs of bits of 8; each group has two scales.
struct Q6_KWeights {
  static constexpr int BLOCK = 4;
  static constexpr int HALVES = 2;
  static constexpr int BLOCK_BYTES = Q6_K_SUPER_BYTES / 2;
  static constexpr int SHIFT = 2;
  static constexpr bool OFFSET = true;
  static constexpr bool MINIMUM = false;

  struct At {
    size_t super = 0;
    size_t quants = K_HEADER_BYTES;
    size_t scales = 64;
    explicit At(int) {}
    HEADRACE_INLINE size_t stream() const { return super + (scales == super + 64 ? 0 : BLOCK_BYTES); }
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
  static HEADRACE_INLINE uint8x16_t word(const uint8_t* strip, const At& at, int i, int quarter) {
    const uint8x16_t v = words_at(strip + at.quants + (PART % 2 * 8 + i) * LINE + quarter * 16);
    const uint8x16_t high = words_at(strip + at.quants + 1024 + i * LINE + quarter * 16);
    const uint8x16_t four = PART < 2 ? vandq_u8(v, vdupq_n_u8(15)) : vshrq_n_u8(v, 4);
    const uint8x16_t two = PART == 0 ? vshlq_n_u8(high, 4) : PART == 1 ? vshlq_n_u8(high, 2) : PART == 2 ? high : vshrq_n_u8(high, 2);
    return vorrq_u8(four, vandq_u8(two, vdupq_n_u8(0x30)));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE float32x4_t scale(const uint8_t* strip, const At& at, int quarter) {
    const float32x4_t fourth = vmulq_f32(halves_at(strip + at.super + quarter * 8), vdupq_n_f32(0.25f));
    return vmulq_f32(signed_bytes_at(strip + at.scales + (2 * PART + HALF) * STRIP + quarter * 4), fourth);
  }
};

}  // namespace headrace::cpu
