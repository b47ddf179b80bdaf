// What the words of each integer format are on AVX2: 4 inputs of 8 rows, half a strip, in a register, as unsigned bytes.
#pragma once

#include <immintrin.h>

#include "formats.h"
#include "simd.h"

namespace headrace::cpu {

HEADRACE_INLINE __m256i words_at(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
HEADRACE_INLINE __m256 halves_at(const uint8_t* p) { return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p))); }
HEADRACE_INLINE __m256 bytes_at(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
HEADRACE_INLINE __m256 signed_bytes_at(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
template <int BITS>
HEADRACE_INLINE __m256i masked(__m256i x) {
  return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(BITS)));
}

// A block is the groups whose quants lie in the same words. At begins at one half of a strip, next() goes on to the next
// block, stream() is how far the strip is read; `word` is 4 inputs of group PART of the block; scale and minimum belong to that
// group (or to half HALF of it).
//
// WORDS_16: so many words times inputs of INT8 fit a sum of 16 bits; 0: not even one.
// SHIFT: the sum counts so many bits more, and OFFSET: it gets Panel::offset then (tiles.h: 16 q - 128, 4 q - 128).

struct Q8_0Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr int BLOCK_BYTES = 512 + 32;
  static constexpr int WORDS_16 = 0;
  static constexpr int SHIFT = 0;
  static constexpr bool OFFSET = true;
  static constexpr bool MINIMUM = false;

  struct At {
    size_t quants, scales;
    At(int groups, int half) : quants(scales_bytes(groups) + half * 32), scales(half * 16) {}
    HEADRACE_INLINE size_t stream() const { return scales / 32 * BLOCK_BYTES; }
    HEADRACE_INLINE void next() {
      quants += 512;
      scales += STRIP * 2;
    }
  };

  template <int PART>
  static HEADRACE_INLINE __m256i word(const uint8_t* strip, const At& at, int i) {
    return words_at(strip + at.quants + i * LINE);
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m256 scale(const uint8_t* strip, const At& at) {
    return halves_at(strip + at.scales);
  }
};

struct Q4_0Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr int BLOCK_BYTES = 256 + 32;
  static constexpr int WORDS_16 = 8;
  static constexpr int SHIFT = 4;
  static constexpr bool OFFSET = true;
  static constexpr bool MINIMUM = false;

  struct At {
    size_t quants, scales;
    At(int groups, int half) : quants(scales_bytes(groups) + half * 32), scales(half * 16) {}
    HEADRACE_INLINE size_t stream() const { return scales / 32 * BLOCK_BYTES; }
    HEADRACE_INLINE void next() {
      quants += 256;
      scales += STRIP * 2;
    }
  };

  template <int PART>
  static HEADRACE_INLINE __m256i word(const uint8_t* strip, const At& at, int i) {
    const __m256i v = words_at(strip + at.quants + i % 4 * LINE);
    return masked<0x0f>(i < 4 ? v : _mm256_srli_epi16(v, 4));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m256 scale(const uint8_t* strip, const At& at) {
    return _mm256_mul_ps(halves_at(strip + at.scales), _mm256_set1_ps(0.0625f));
  }
};

struct Q4_1Weights {
  static constexpr int BLOCK = 1;
  static constexpr int HALVES = 1;
  static constexpr int BLOCK_BYTES = Q4_1_GROUP_BYTES;
  static constexpr int WORDS_16 = 8;
  static constexpr int SHIFT = 0;
  static constexpr bool OFFSET = false;
  static constexpr bool MINIMUM = true;
  static constexpr bool SUBTRACTED = false;

  struct At {
    size_t quants, scales;
    At(int, int half) : quants(half * 32), scales(256 + half * 16) {}
    HEADRACE_INLINE size_t stream() const { return quants; }
    HEADRACE_INLINE void next() {
      quants += Q4_1_GROUP_BYTES;
      scales += Q4_1_GROUP_BYTES;
    }
  };

  template <int PART>
  static HEADRACE_INLINE __m256i word(const uint8_t* strip, const At& at, int i) {
    const __m256i v = words_at(strip + at.quants + i % 4 * LINE);
    return masked<0x0f>(i < 4 ? v : _mm256_srli_epi16(v, 4));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m256 scale(const uint8_t* strip, const At& at) {
    return halves_at(strip + at.scales);
  }
  template <int PART>
  static HEADRACE_INLINE __m256 minimum(const uint8_t* strip, const At& at) {
    return halves_at(strip + at.scales + 32);
  }
};

struct Q4_ZWeights : Q4_1Weights {
  template <int PART>
  static HEADRACE_INLINE __m256 minimum(const uint8_t* strip, const At& at) {
    return _mm256_mul_ps(Q4_1Weights::minimum<PART>(strip, at), scale<PART, 0>(strip, at));
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
  static constexpr int WORDS_16 = FIVE ? 4 : 8;
  static constexpr int SHIFT = 0;
  static constexpr bool OFFSET = false;
  static constexpr bool MINIMUM = true;
  static constexpr bool SUBTRACTED = true;  // the minimum

  struct At {
    size_t super, quants, scales;
    int half;
    int pair = 0;
    At(int, int half) : super(0), quants(QUANTS + half * 32), scales(64 + half * 8), half(half) {}
    HEADRACE_INLINE size_t stream() const { return super + pair * BLOCK_BYTES; }
    HEADRACE_INLINE void next() {
      quants += 512;
      scales += 2 * STRIP;
      pair++;
      if (pair == 4) {
        super += SUPER_BYTES;
        quants = super + QUANTS + half * 32;
        scales = super + 64 + half * 8;
        pair = 0;
      }
    }
  };

  template <int PART>
  static HEADRACE_INLINE __m256i word(const uint8_t* strip, const At& at, int i) {
    const __m256i v = words_at(strip + at.quants + i * LINE);
    const __m256i nibbles = masked<0x0f>(PART == 0 ? v : _mm256_srli_epi16(v, 4));
    if constexpr (!FIVE) {
      return nibbles;
    } else {
      const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << (2 * at.pair + PART)));
      const __m256i bits = words_at(strip + at.super + K_HEADER_BYTES + at.half * 32 + i * LINE);
      const __m256i has = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
      return _mm256_or_si256(nibbles, masked<0x10>(has));
    }
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m256 scale(const uint8_t* strip, const At& at) {
    return _mm256_mul_ps(bytes_at(strip + at.scales + PART * STRIP), halves_at(strip + at.super + at.half * 16));
  }
  template <int PART>
  static HEADRACE_INLINE __m256 minimum(const uint8_t* strip, const At& at) {
    return _mm256_mul_ps(bytes_at(strip + at.scales + 128 + PART * STRIP), halves_at(strip + at.super + 32 + at.half * 16));
  }
};

using Q4_KWeights = KWeights<false>;
using Q5_KWeights = KWeights<true>;

// Half a super-block: four groups in the nibbles of 16 words and the pairs of bits of 8; each group has two scales.
struct Q6_KWeights {
  static constexpr int BLOCK = 4;
  static constexpr int HALVES = 2;
  static constexpr int BLOCK_BYTES = Q6_K_SUPER_BYTES / 2;
  static constexpr int WORDS_16 = 2;
  static constexpr int SHIFT = 2;
  static constexpr bool OFFSET = true;
  static constexpr bool MINIMUM = false;

  struct At {
    size_t super, quants, scales;
    int half;
    bool second = false;
    At(int, int half) : super(0), quants(K_HEADER_BYTES + half * 32), scales(64 + half * 8), half(half) {}
    HEADRACE_INLINE size_t stream() const { return super + (second ? BLOCK_BYTES : 0); }
    HEADRACE_INLINE void next() {
      if (!second) {
        quants += Q6_K_HALF_BYTES;
        scales += 8 * STRIP;
      } else {
        super += Q6_K_SUPER_BYTES;
        quants = super + K_HEADER_BYTES + half * 32;
        scales = super + 64 + half * 8;
      }
      second = !second;
    }
  };

  template <int PART>
  static HEADRACE_INLINE __m256i word(const uint8_t* strip, const At& at, int i) {
    const __m256i v = words_at(strip + at.quants + (PART % 2 * 8 + i) * LINE);
    const __m256i high = words_at(strip + at.quants + 1024 + i * LINE);
    const __m256i four = masked<0x0f>(PART < 2 ? v : _mm256_srli_epi16(v, 4));
    const __m256i two = PART < 2 ? _mm256_slli_epi16(high, 4 - 2 * PART) : PART == 2 ? high : _mm256_srli_epi16(high, 2);
    return _mm256_or_si256(four, masked<0x30>(two));
  }
  template <int PART, int HALF>
  static HEADRACE_INLINE __m256 scale(const uint8_t* strip, const At& at) {
    const __m256 quarter = _mm256_mul_ps(halves_at(strip + at.super + at.half * 16), _mm256_set1_ps(0.25f));
    return _mm256_mul_ps(signed_bytes_at(strip + at.scales + (2 * PART + HALF) * STRIP), quarter);
  }
};

}  // namespace headrace::cpu
