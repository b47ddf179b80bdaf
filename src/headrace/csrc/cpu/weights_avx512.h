// What the words of each integer format are on AVX-512: 4 inputs of 16 rows in a register, as unsigned bytes.
//
// vpdpbusd wants one unsigned operand: the weights. Where they are signed in the file they come with 128 added (Q8_0), or
// moved to the top of the byte (Q4_0: 16 q, Q6_K: 4 q), so that 128 too is what they have too much: the sum starts at -128 times
// the sum of the inputs (Panel::offset).
#pragma once

#include <immintrin.h>

#include "formats.h"
#include "simd.h"

namespace headrace::cpu {

HEADRACE_INLINE __m512i words_at(const uint8_t* p) { return _mm512_load_si512(p); }
HEADRACE_INLINE __m512 halves_at(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p))); }
HEADRACE_INLINE __m512 bytes_at(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}
HEADRACE_INLINE __m512 signed_bytes_at(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}
template <int BITS>
HEADRACE_INLINE __m512i masked(__m512i x) {
  return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(BITS)));
}

// -- formats
//
// A block is the groups whose quants lie in the same words. At::next() goes on to the next block, At::stream() is how far the
// strip is read; `word` is 4 inputs of group PART of the block, unsigned; scale and minimum belong to that group (or to half HALF
// of it).
// NIBBLES_APART: words i and i + 4 are the nibbles of one.

struct Q8_0Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr int BLOCK_BYTES = 512 + 32;
  static constexpr bool OFFSET = true;
  static constexpr bool MINIMUM = false;
  static constexpr bool NIBBLES_APART = false;

  struct At {
    size_t quants, scales;
    explicit At(int groups) : quants(scales_bytes(groups)), scales(0) {}
    HEADRACE_INLINE size_t stream() const { return scales / 32 * BLOCK_BYTES; }
    HEADRACE_INLINE void next() {
      quants += 512;
      scales += STRIP * 2;
    }
  };

  template <int PART>
  static HEADRACE_INLINE __m512i word(const uint8_t* strip, const At& at, int i) {
    return words_at(strip + at.quants + i * LINE);
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m512 scale(const uint8_t* strip, const At& at) {
    return halves_at(strip + at.scales);
  }
};

struct Q4_0Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr int BLOCK_BYTES = 256 + 32;
  static constexpr bool OFFSET = true;
  static constexpr bool MINIMUM = false;
  static constexpr bool NIBBLES_APART = true;

  struct At {
    size_t quants, scales;
    explicit At(int groups) : quants(scales_bytes(groups)), scales(0) {}
    HEADRACE_INLINE size_t stream() const { return scales / 32 * BLOCK_BYTES; }
    HEADRACE_INLINE void next() {
      quants += 256;
      scales += STRIP * 2;
    }
  };

  template <int PART>
  static HEADRACE_INLINE __m512i word(const uint8_t* strip, const At& at, int i) {
    const __m512i v = words_at(strip + at.quants + i % 4 * LINE);
    return masked<0xf0>(i < 4 ? _mm512_slli_epi16(v, 4) : v);
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m512 scale(const uint8_t* strip, const At& at) {
    return _mm512_mul_ps(halves_at(strip + at.scales), _mm512_set1_ps(0.0625f));
  }
};

struct Q4_1Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr int BLOCK_BYTES = Q4_1_GROUP_BYTES;
  static constexpr bool OFFSET = false;
  static constexpr bool MINIMUM = true;
  static constexpr bool SUBTRACTED = false;
  static constexpr bool NIBBLES_APART = true;

  struct At {
    size_t quants = 0;
    explicit At(int) {}
    HEADRACE_INLINE size_t stream() const { return quants; }
    HEADRACE_INLINE void next() { quants += Q4_1_GROUP_BYTES; }
  };

  template <int PART>
  static HEADRACE_INLINE __m512i word(const uint8_t* strip, const At& at, int i) {
    const __m512i v = words_at(strip + at.quants + i % 4 * LINE);
    return masked<0x0f>(i < 4 ? v : _mm512_srli_epi16(v, 4));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m512 scale(const uint8_t* strip, const At& at) {
    return halves_at(strip + at.quants + 256);
  }
  template <int PART>
  static HEADRACE_INLINE __m512 minimum(const uint8_t* strip, const At& at) {
    return halves_at(strip + at.quants + 288);
  }
};

struct Q4_ZWeights : Q4_1Weights {
  template <int PART>
  static HEADRACE_INLINE __m512 minimum(const uint8_t* strip, const At& at) {
    return _mm512_mul_ps(Q4_1Weights::minimum<PART>(strip, at), scale<PART, 0>(strip, at));
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
  static constexpr bool OFFSET = false;
  static constexpr bool MINIMUM = true;
  static constexpr bool SUBTRACTED = true;  // the minimum
  static constexpr bool NIBBLES_APART = false;

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
  static HEADRACE_INLINE __m512i word(const uint8_t* strip, const At& at, int i) {
    const __m512i v = words_at(strip + at.quants + i * LINE);
    const __m512i nibbles = masked<0x0f>(PART == 0 ? v : _mm512_srli_epi16(v, 4));
    if constexpr (!FIVE) {
      return nibbles;
    } else {
      const __m512i bit = _mm512_set1_epi8(static_cast<char>(1 << (2 * at.pair + PART)));
      const __mmask64 has = _mm512_test_epi8_mask(words_at(strip + at.super + K_HEADER_BYTES + i * LINE), bit);
      return _mm512_mask_add_epi8(nibbles, has, nibbles, _mm512_set1_epi8(16));
    }
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m512 scale(const uint8_t* strip, const At& at) {
    return _mm512_mul_ps(bytes_at(strip + at.scales + PART * STRIP), halves_at(strip + at.super));
  }
  template <int PART>
  static HEADRACE_INLINE __m512 minimum(const uint8_t* strip, const At& at) {
    return _mm512_mul_ps(bytes_at(strip + at.scales + 128 + PART * STRIP), halves_at(strip + at.super + 32));
  }
};

using Q4_KWeights = KWeights<false>;
using Q5_KWeights = KWeights<true>;

// Half a super-block: four groups in the nibbles of 16 words and the pairs of bits of 8; each group has two scales.
struct Q6_KWeights {
  static constexpr int BLOCK = 4;
  static constexpr int HALVES = 2;
  static constexpr int BLOCK_BYTES = Q6_K_SUPER_BYTES / 2;
  static constexpr bool OFFSET = true;
  static constexpr bool MINIMUM = false;
  static constexpr bool NIBBLES_APART = false;

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
  static HEADRACE_INLINE __m512i word(const uint8_t* strip, const At& at, int i) {
    const __m512i v = words_at(strip + at.quants + (PART % 2 * 8 + i) * LINE);
    const __m512i high = words_at(strip + at.quants + 1024 + i * LINE);
    const __m512i four = masked<0x3c>(PART < 2 ? _mm512_slli_epi16(v, 2) : _mm512_srli_epi16(v, 2));
    const __m512i two = PART == 3 ? high : _mm512_slli_epi16(high, 6 - 2 * PART);
    return _mm512_ternarylogic_epi32(two, _mm512_set1_epi8(static_cast<char>(0xc0)), four, 0xea);  // (two & 0xc0) | four
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m512 scale(const uint8_t* strip, const At& at) {
    const __m512 quarter = _mm512_mul_ps(halves_at(strip + at.super), _mm512_set1_ps(0.25f));
    return _mm512_mul_ps(signed_bytes_at(strip + at.scales + (2 * PART + HALF) * STRIP), quarter);
  }
};

}  // namespace headrace::cpu
