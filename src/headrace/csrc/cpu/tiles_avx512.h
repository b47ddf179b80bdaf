// Tiles on AVX-512 with VNNI: a strip is one register, and each lane gets four products of bytes by vpdpbusd (INT8), two of int16 by
// vpdpwssd (INT16). Many rows of integers are AMX's, where it is: tiles_amx.h.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "fetch.h"
#include "simd.h"
#include "tiles.h"
#include "weights_avx512.h"
#if HEADRACE_AMX
#include "tiles_amx.h"
#endif

namespace headrace::cpu {

HEADRACE_INLINE __m512i four_bytes(const int8_t* p) {
  int word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// -- integer products

// One panel's pointers, which go along with the groups; an input has BYTES.
template <int MR, int BYTES>
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
    ints += GROUP * MR * BYTES;
    scale += MR;
    scaled_sum += MR;
    offset += MR;
    half_offset += 2 * MR;
  }
};

template <int MR, int NR>
HEADRACE_INLINE void start(__m512i (&sums)[MR][NR], const int32_t* offsets) {
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      sums[m][n] = offsets == nullptr ? _mm512_setzero_si512() : _mm512_set1_epi32(offsets[m]);
    }
  }
}

// The same strips, which the compiler does not know to be the same: it would keep what was loaded or unpacked before, and for want of
// registers keep it in memory. Doing it again is cheaper.
template <int NR>
struct Again {
  const uint8_t* strips[NR];

  HEADRACE_INLINE explicit Again(const uint8_t* const (&same)[NR]) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      strips[n] = same[n];
      asm("" : "+r"(strips[n]));
    }
  }
};

// The integer sums of a group, or of half of one. Fetches as much of the streams as it reads.
template <class W, int PART, int HALF, int BYTES, int MR, int NR>
HEADRACE_INLINE void sum_group(const uint8_t* const (&strips)[NR], const typename W::At& at, const IntegerRows<MR, BYTES>& rows,
                               __m512i (&sum)[MR][NR]) {
  constexpr int CHAINS = MR * NR < 8 ? BYTES : 1;  // with few sums each product would wait for the one before
  __m512i sums[CHAINS][MR][NR];
  start(sums[0], !W::OFFSET ? nullptr : W::HALVES == 1 ? rows.offset : rows.half_offset + HALF * MR);
  if constexpr (CHAINS == 2) start(sums[1], nullptr);
  constexpr int WORDS = 8 / W::HALVES;
  constexpr int GROUP_BYTES = W::BLOCK_BYTES / W::BLOCK;
  HEADRACE_UNROLL for (int step = 0; step < WORDS; step++) {
    const int i = W::NIBBLES_APART ? step / 2 + step % 2 * 4 : HALF * WORDS + step;
    const int line = (HALF * WORDS + step) * LINE;
    __m512i weights[NR];
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      const uint8_t* stream = strips[n] + at.stream() + PART * GROUP_BYTES;
      if (line < GROUP_BYTES) fetch_ahead<NR>(stream + line);
      if (GROUP_BYTES > 8 * LINE && step == WORDS - 1) {  // in the order of the addresses: else a fifth of the rate is lost
        fetch_ahead<NR>(stream + 8 * LINE);
      }
      weights[n] = W::template word<PART>(strips[n], at, i);
    }
    HEADRACE_UNROLL for (int odd = 0; odd < BYTES; odd++) {
      __m512i pairs[NR];
      HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
        pairs[n] = odd ? _mm512_srli_epi16(weights[n], 8) : _mm512_and_si512(weights[n], _mm512_set1_epi16(0xff));
      }
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        const __m512i inputs = four_bytes(rows.ints + ((i * MR + m) * BYTES + odd) * 4);
        HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
          __m512i& chain = sums[odd % CHAINS][m][n];
          chain = BYTES == 1 ? _mm512_dpbusd_epi32(chain, weights[n], inputs) : _mm512_dpwssd_epi32(chain, pairs[n], inputs);
        }
      }
    }
  }
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      sum[m][n] = CHAINS == 1 ? sums[0][m][n] : _mm512_add_epi32(sums[0][m][n], sums[CHAINS - 1][m][n]);
    }
  }
}

template <class W, int PART, int HALF, int MR, int NR, int BYTES>
HEADRACE_INLINE void add_half(const uint8_t* const (&strips)[NR], const typename W::At& at, const IntegerRows<MR, BYTES>& rows, __m512 (&acc)[MR][NR]) {
  __m512i sum[MR][NR];
  sum_group<W, PART, HALF>(strips, at, rows, sum);
  HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
    const __m512 scale = W::template scale<PART, HALF>(strips[n], at);
    HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[m][n]), _mm512_set1_ps(rows.scale[m]));
      acc[m][n] = _mm512_fmadd_ps(scaled, scale, acc[m][n]);
    }
  }
}

template <class W, int PART, int MR, int NR, int BYTES>
HEADRACE_INLINE void add_groups(const uint8_t* const (&strips)[NR], const typename W::At& at, IntegerRows<MR, BYTES>& rows, __m512 (&acc)[MR][NR]) {
  add_half<W, PART, 0, MR, NR, BYTES>(strips, at, rows, acc);
  if constexpr (W::HALVES == 2) {
    add_half<W, PART, 1, MR, NR, BYTES>(strips, at, rows, acc);
  }
  if constexpr (W::MINIMUM) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      const __m512 minimum = W::template minimum<PART>(strips[n], at);
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        const __m512 sum = _mm512_set1_ps(rows.scaled_sum[m]);
        acc[m][n] = W::SUBTRACTED ? _mm512_fnmadd_ps(minimum, sum, acc[m][n]) : _mm512_fmadd_ps(minimum, sum, acc[m][n]);
      }
    }
  }
  rows.next();
  if constexpr (PART + 1 < W::BLOCK) {
    const Again<NR> again(strips);
    add_groups<W, PART + 1, MR, NR, BYTES>(again.strips, at, rows, acc);
  }
}

template <int MR, int NR>
HEADRACE_INLINE void store_tile(const __m512 (&acc)[MR][NR], float* out) {
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      _mm512_store_ps(out + (m * NR + n) * STRIP, acc[m][n]);
    }
  }
}

template <int MR, int NR>
HEADRACE_INLINE void clear(__m512 (&acc)[MR][NR]) {
  HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      acc[m][n] = _mm512_setzero_ps();
    }
  }
}

template <class W, int BYTES>
struct IntegerTile {
  template <int MR, int NR>
  static void run(const uint8_t* const* all, const Panel& panel, float* out) {
    const uint8_t* strips[NR];
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      strips[n] = all[n];
    }
    __m512 acc[MR][NR];
    clear(acc);
    IntegerRows<MR, BYTES> rows(panel);
    typename W::At at(panel.groups);
    for (int g = 0; g < panel.groups; g += W::BLOCK) {
      add_groups<W, 0, MR, NR, BYTES>(strips, at, rows, acc);
      at.next();
    }
    store_tile(acc, out);
  }
};

// -- float products

struct F32Weights {
  static constexpr int BYTES = 64;  // of an input
  static HEADRACE_INLINE void load(const uint8_t* p, __m512& even, __m512& odd) {
    even = _mm512_load_ps(p);
    odd = _mm512_load_ps(p + 64);
  }
};

struct F16Weights {
  static constexpr int BYTES = 32;
  static HEADRACE_INLINE void load(const uint8_t* p, __m512& even, __m512& odd) {
    even = halves_at(p);
    odd = halves_at(p + 32);
  }
};

struct Bf16Weights {
  static constexpr int BYTES = 32;
  static HEADRACE_INLINE void load(const uint8_t* p, __m512& even, __m512& odd) {
    const __m512i pairs = words_at(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
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
    __m512 acc[MR][NR];
    clear(acc);
    const float* x = panel.f32;
    size_t at = 0;
    for (int pair = 0; pair < panel.groups * GROUP / 2; pair++) {
      HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
        __m512 even, odd;
        W::load(strips[n] + at, even, odd);
        HEADRACE_UNROLL for (int line = 0; line < 2 * W::BYTES; line += LINE) {
          fetch_ahead<NR>(strips[n] + at + line);
        }
        HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
          acc[m][n] = _mm512_fmadd_ps(even, _mm512_set1_ps(x[m]), acc[m][n]);
        }
        HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
          acc[m][n] = _mm512_fmadd_ps(odd, _mm512_set1_ps(x[MR + m]), acc[m][n]);
        }
      }
      at += 2 * W::BYTES;
      x += 2 * MR;
    }
    store_tile(acc, out);
  }
};

#if defined(__AVX512BF16__)
// Two products of bfloat16 a lane and instruction.
struct Bf16Tile {
  template <int MR, int NR>
  static void run(const uint8_t* const* all, const Panel& panel, float* out) {
    const uint8_t* strips[NR];
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      strips[n] = all[n];
    }
    __m512 acc[MR][NR];
    clear(acc);
    const uint32_t* x = panel.bf16;
    size_t at = 0;
    for (int four = 0; four < panel.groups * GROUP / 8; four++) {
      HEADRACE_UNROLL for (int i = 0; i < 4; i++) {
        HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
          const __m512bh weights = (__m512bh)words_at(strips[n] + at);
          fetch_ahead<NR>(strips[n] + at);
          HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
            acc[m][n] = _mm512_dpbf16_ps(acc[m][n], weights, (__m512bh)_mm512_set1_epi32(static_cast<int>(x[m])));
          }
        }
        at += LINE;
        x += MR;
      }
    }
    store_tile(acc, out);
  }
};
#endif

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
      return {AnyTile::template run<4, 2>, 2};
    case 6:
      return {AnyTile::template run<6, 2>, 2};
    case 8:
      return {AnyTile::template run<8, 1>, 1};
    default:
      return {AnyTile::template run<12, 1>, 1};
  }
}

template <class W>
Tile integer_tile_of(Rounding rounding, int panel_rows) {
#if HEADRACE_AMX
  if (panel_rows == AMX_ROWS) {
    return {AmxTile<W>::run, 1};
  }
#endif
  return rounding == Rounding::INT8 ? tile_of<IntegerTile<W, 1>>(panel_rows) : tile_of<IntegerTile<W, 2>>(panel_rows);
}

template <class W>
Tile float_tile_of(int panel_rows) {
  return tile_of<FloatTile<W>>(panel_rows);
}

inline Tile bf16_tile_of(int panel_rows) {
#if defined(__AVX512BF16__)
  return tile_of<Bf16Tile>(panel_rows);
#else
  return float_tile_of<Bf16Weights>(panel_rows);
#endif
}

}  // namespace headrace::cpu
