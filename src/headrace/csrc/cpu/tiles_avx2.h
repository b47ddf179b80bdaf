// Tiles on AVX2, half a strip at a time: the integers and the order of the floats are those of AVX-512, so the bits are too.
//
// INT8: vpmaddubsw adds two products of bytes in 16 bits, where 4 bits of weight leave room for a whole group; bytes of weight leave
// none, so there the weights lose their sign to the inputs. INT16: vpmaddwd on even and odd inputs.
// With AVX-VNNI one instruction does what these take two to four for: vpdpbusd with bytes, vpdpwssd with int16.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "fetch.h"
#include "simd.h"
#include "tiles.h"
#include "weights_avx2.h"

namespace headrace::cpu {

HEADRACE_INLINE __m256i inputs_at(const int8_t* p) {
  int word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

template <int MR, int NR>
HEADRACE_INLINE void clear(__m256 (&acc)[MR][NR]) {
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      acc[m][n] = _mm256_setzero_ps();
    }
  }
}

// -- integer products

// One panel's pointers, which go along with the groups. GROUP_BYTES: of a row's integers of a group.
template <int MR, int GROUP_BYTES>
struct IntegerRows {
  const int8_t* ints;
  const float* scale;
  const float* scaled_sum;
  const int32_t* offset;
  const int32_t* half_offset;

  explicit IntegerRows(const Panel& panel)
      : ints(panel.ints),
        scale(panel.scale),
        scaled_sum(panel.scaled_sum),
        offset(panel.offset),
        half_offset(panel.half_offset) {}

  HEADRACE_INLINE void next() {
    ints += GROUP_BYTES * MR;
    scale += MR;
    scaled_sum += MR;
    offset += MR;
    half_offset += 2 * MR;
  }
};

// sums + products of pairs of int16.
HEADRACE_INLINE __m256i add_pairs(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

#if defined(__AVXVNNI__)
inline constexpr bool BYTE_DOTS = true;

// INT8, whatever the weights are.
template <class W, int PART, int HALF, int MR, int NR>
HEADRACE_INLINE void sum_int8(const uint8_t* const (&strips)[NR], const typename W::At& at, const int8_t* ints, __m256i (&sums)[MR][NR]) {
  constexpr int WORDS = 8 / W::HALVES;
  HEADRACE_UNROLL for (int i = HALF * WORDS; i < (HALF + 1) * WORDS; i++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      const __m256i weights = W::template word<PART>(strips[n], at, i);
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        sums[m][n] = _mm256_dpbusd_avx_epi32(sums[m][n], weights, inputs_at(ints + (i * MR + m) * 4));
      }
    }
  }
}

#else
inline constexpr bool BYTE_DOTS = false;

// INT8, all words of the group in one sum of 16 bits.
template <class W, int PART, int MR, int NR>
HEADRACE_INLINE void sum_nibbles(const uint8_t* const (&strips)[NR], const typename W::At& at, const int8_t* ints, __m256i (&sums)[MR][NR]) {
  HEADRACE_UNROLL for (int i = 0; i < 8; i++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      const __m256i weights = W::template word<PART>(strips[n], at, i);
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        sums[m][n] = _mm256_add_epi16(sums[m][n], _mm256_maddubs_epi16(weights, inputs_at(ints + (i * MR + m) * 4)));
      }
    }
  }
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      sums[m][n] = _mm256_madd_epi16(sums[m][n], _mm256_set1_epi16(1));
    }
  }
}

// INT8, a few words in a sum of 16 bits.
template <class W, int PART, int HALF, int MR, int NR>
HEADRACE_INLINE void sum_wider(const uint8_t* const (&strips)[NR], const typename W::At& at, const int8_t* ints, __m256i (&sums)[MR][NR]) {
  constexpr int WORDS = 8 / W::HALVES;
  HEADRACE_UNROLL for (int first = HALF * WORDS; first < (HALF + 1) * WORDS; first += W::WORDS_16) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      __m256i weights[W::WORDS_16];
      HEADRACE_UNROLL for (int i = 0; i < W::WORDS_16; i++) {
        weights[i] = W::template word<PART>(strips[n], at, first + i);
      }
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        __m256i sum = _mm256_maddubs_epi16(weights[0], inputs_at(ints + (first * MR + m) * 4));
        HEADRACE_UNROLL for (int i = 1; i < W::WORDS_16; i++) {
          sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights[i], inputs_at(ints + ((first + i) * MR + m) * 4)));
        }
        sums[m][n] = add_pairs(sums[m][n], sum, _mm256_set1_epi16(1));
      }
    }
  }
}

// INT8, bytes of weights with 128 added: |weight| times the input with the weight's sign.
template <class W, int PART, int MR, int NR>
HEADRACE_INLINE void sum_bytes(const uint8_t* const (&strips)[NR], const typename W::At& at, const int8_t* ints, __m256i (&sums)[MR][NR]) {
  HEADRACE_UNROLL for (int i = 0; i < 8; i++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      const __m256i weights = _mm256_xor_si256(W::template word<PART>(strips[n], at, i), _mm256_set1_epi8(static_cast<char>(0x80)));
      const __m256i sizes = _mm256_abs_epi8(weights);
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        const __m256i inputs = _mm256_sign_epi8(inputs_at(ints + (i * MR + m) * 4), weights);
        sums[m][n] = add_pairs(sums[m][n], _mm256_maddubs_epi16(sizes, inputs), _mm256_set1_epi16(1));
      }
    }
  }
}

template <class W, int PART, int HALF, int MR, int NR>
HEADRACE_INLINE void sum_int8(const uint8_t* const (&strips)[NR], const typename W::At& at, const int8_t* ints, __m256i (&sums)[MR][NR]) {
  if constexpr (W::WORDS_16 == 0) {
    sum_bytes<W, PART>(strips, at, ints, sums);
  } else if constexpr (W::WORDS_16 == 8) {
    sum_nibbles<W, PART>(strips, at, ints, sums);
  } else {
    sum_wider<W, PART, HALF>(strips, at, ints, sums);
  }
}
#endif

template <class W, int PART, int HALF, int MR, int NR>
HEADRACE_INLINE void sum_int16(const uint8_t* const (&strips)[NR], const typename W::At& at, const int8_t* ints, __m256i (&sums)[MR][NR]) {
  constexpr int WORDS = 8 / W::HALVES;
  HEADRACE_UNROLL for (int i = HALF * WORDS; i < (HALF + 1) * WORDS; i++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      const __m256i weights = W::template word<PART>(strips[n], at, i);
      const __m256i even = _mm256_and_si256(weights, _mm256_set1_epi16(0xff));
      const __m256i odd = _mm256_srli_epi16(weights, 8);
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        const int8_t* inputs = ints + (i * MR + m) * 8;
        sums[m][n] = add_pairs(sums[m][n], even, inputs_at(inputs));
        sums[m][n] = add_pairs(sums[m][n], odd, inputs_at(inputs + 4));
      }
    }
  }
}

template <class W, int PART, int HALF, Rounding R, int MR, int NR, class Inputs>
HEADRACE_INLINE void add_half(const uint8_t* const (&strips)[NR], const typename W::At& at, const Inputs& rows, __m256 (&acc)[MR][NR]) {
  constexpr bool SIGNED = R == Rounding::INT8 && W::WORDS_16 == 0 && !BYTE_DOTS;  // the sum has no 128 too much
  __m256i sums[MR][NR];
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      sums[m][n] = _mm256_setzero_si256();
    }
  }
  if constexpr (R == Rounding::INT16) {
    sum_int16<W, PART, HALF>(strips, at, rows.ints, sums);
  } else {
    sum_int8<W, PART, HALF>(strips, at, rows.ints, sums);
  }
  const int32_t* offsets = W::HALVES == 1 ? rows.offset : rows.half_offset + HALF * MR;
  HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
    const __m256 scale = W::template scale<PART, HALF>(strips[n], at);
    HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
      __m256i sum = _mm256_slli_epi32(sums[m][n], W::SHIFT);
      if constexpr (W::OFFSET && !SIGNED) {
        sum = _mm256_add_epi32(sum, _mm256_set1_epi32(offsets[m]));
      }
      const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(rows.scale[m]));
      acc[m][n] = _mm256_fmadd_ps(scaled, scale, acc[m][n]);
    }
  }
}

template <class W, int PART, Rounding R, int MR, int NR, class Inputs>
HEADRACE_INLINE void add_groups(const uint8_t* const (&strips)[NR], const typename W::At& at, Inputs& rows, __m256 (&acc)[MR][NR]) {
  add_half<W, PART, 0, R>(strips, at, rows, acc);
  if constexpr (W::HALVES == 2) {
    add_half<W, PART, 1, R>(strips, at, rows, acc);
  }
  if constexpr (W::MINIMUM) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      const __m256 minimum = W::template minimum<PART>(strips[n], at);
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        const __m256 sum = _mm256_set1_ps(rows.scaled_sum[m]);
        acc[m][n] = W::SUBTRACTED ? _mm256_fnmadd_ps(minimum, sum, acc[m][n]) : _mm256_fmadd_ps(minimum, sum, acc[m][n]);
      }
    }
  }
  rows.next();
  if constexpr (PART + 1 < W::BLOCK) {
    add_groups<W, PART + 1, R>(strips, at, rows, acc);
  }
}

template <class W, Rounding R>
struct IntegerTile {
  template <int MR, int NR>
  static void run(const uint8_t* const* all, const Panel& panel, float* out) {
    const uint8_t* strips[NR];
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      strips[n] = all[n];
    }
    for (int half = 0; half < 2; half++) {
      __m256 acc[MR][NR];
      clear(acc);
      IntegerRows<MR, R == Rounding::INT16 ? 2 * GROUP : GROUP> rows(panel);
      typename W::At at(panel.groups, half);
      for (int g = 0; g < panel.groups; g += W::BLOCK) {
        if (half == 0) {
          HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
            HEADRACE_UNROLL for (int line = 0; line < W::BLOCK_BYTES; line += LINE) {
              fetch_ahead<NR>(strips[n] + at.stream() + line);
            }
          }
        }
        add_groups<W, 0, R>(strips, at, rows, acc);
        at.next();
      }
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
          _mm256_store_ps(out + (m * NR + n) * STRIP + half * 8, acc[m][n]);
        }
      }
    }
  }
};

// -- float products, whole strips

struct F32Weights {
  static constexpr int BYTES = 64;  // of an input
  // Two inputs of the first or second 8 rows.
  static HEADRACE_INLINE void load(const uint8_t* p, int half, __m256& even, __m256& odd) {
    even = _mm256_load_ps(reinterpret_cast<const float*>(p + half * 32));
    odd = _mm256_load_ps(reinterpret_cast<const float*>(p + half * 32 + 64));
  }
};

struct F16Weights {
  static constexpr int BYTES = 32;
  static HEADRACE_INLINE void load(const uint8_t* p, int half, __m256& even, __m256& odd) {
    even = halves_at(p + half * 16);
    odd = halves_at(p + half * 16 + 32);
  }
};

struct Bf16Weights {
  static constexpr int BYTES = 32;
  static HEADRACE_INLINE void load(const uint8_t* p, int half, __m256& even, __m256& odd) {
    const __m256i pairs = words_at(p + half * 32);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
};

template <class W>
struct FloatTile {
  template <int MR, int NR>
  static void run(const uint8_t* const* all, const Panel& panel, float* out) {
    const uint8_t* strips[NR];
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      strips[n] = all[n];
    }
    __m256 acc[MR][2 * NR];
    clear(acc);
    const float* x = panel.f32;
    size_t at = 0;
    for (int pair = 0; pair < panel.groups * GROUP / 2; pair++) {
      HEADRACE_UNROLL for (int n = 0; n < 2 * NR; n++) {
        __m256 even, odd;
        W::load(strips[n / 2] + at, n % 2, even, odd);
        if (n % 2 == 0) {
          HEADRACE_UNROLL for (int line = 0; line < 2 * W::BYTES; line += LINE) {
            fetch_ahead<NR>(strips[n / 2] + at + line);
          }
        }
        HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
          acc[m][n] = _mm256_fmadd_ps(even, _mm256_set1_ps(x[m]), acc[m][n]);
        }
        HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
          acc[m][n] = _mm256_fmadd_ps(odd, _mm256_set1_ps(x[MR + m]), acc[m][n]);
        }
      }
      at += 2 * W::BYTES;
      x += 2 * MR;
    }
    HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
      HEADRACE_UNROLL for (int n = 0; n < 2 * NR; n++) {
        _mm256_store_ps(out + m * NR * STRIP + n * 8, acc[m][n]);
      }
    }
  }
};

// By the rows of a panel: as many strips as leave registers for the sums, but no more than two: few streams are what the memory is
// fastest at.
template <class AnyTile>
Tile tile_of(int panel_rows) {
  switch (panel_rows) {
    case 1:
      return {AnyTile::template run<1, 2>, 2};
    case 2:
      return {AnyTile::template run<2, 2>, 2};
    case 3:
      return {AnyTile::template run<3, 2>, 2};
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
