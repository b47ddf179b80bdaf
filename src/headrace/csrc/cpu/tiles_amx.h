// Tiles on AMX, for panels of 16 rows of INT16: integers of a group are summed by the tile registers, everything else is as in
// tiles_avx512.h, and so are the bits.
//
// Rows are the left operand, weights the right one, as they are packed. A scale belongs to 32 inputs (or 16), so a product is half
// (or a quarter) as deep as a register allows, and its sums go through memory to be scaled: that, not the products, is what takes
// the time. While one group is scaled, the next is multiplied.
#pragma once

#include <immintrin.h>

#include "amx.h"
#include "fetch.h"
#include "tiles.h"

namespace headrace::cpu {

template <class W>
class AmxTile {
 public:
  static void run(const uint8_t* const* strips, const Panel& panel, float* out) {
    Sums acc;
    HEADRACE_UNROLL for (int m = 0; m < AMX_ROWS; m++) {
      acc[m] = _mm512_setzero_ps();
    }
    AmxTile(strips[0], panel).multiply_all(acc);
    HEADRACE_UNROLL for (int m = 0; m < AMX_ROWS; m++) {
      _mm512_store_ps(out + m * STRIP, acc[m]);
    }
  }

 private:
  static constexpr int INPUTS = GROUP / W::HALVES;  // that are summed
  static constexpr int PLANES = 2;                  // high bytes of the rows and low ones
  // Registers: a sum for each half and plane, rows for each plane, weights.
  static constexpr int SUMS = 0, ROWS = 4, WEIGHTS = 6;

  using Sums = __m512[AMX_ROWS];  // apart from the memory that the tile registers see, or they would not stay in registers

  // The integers of a group on their way: unpacked weights, and sums.
  struct alignas(LINE) Group {
    uint8_t weights[GROUP / 4][LINE];
    int32_t sums[W::HALVES][PLANES][AMX_ROWS][STRIP];
  };

  AmxTile(const uint8_t* strip, const Panel& panel)
      : strip_(strip),
        groups_(panel.groups),
        plane_(static_cast<size_t>(panel.groups) * GROUP * AMX_ROWS),
        ints_(panel.ints),
        scale_(panel.scale),
        scaled_sum_(panel.scaled_sum) {}

  HEADRACE_INLINE void multiply_all(Sums& acc) {
    Group room[2];
    AmxShapes shapes;
    for (int tile = SUMS; tile < ROWS; tile++) shapes.set(tile, AMX_ROWS, LINE);
    for (int tile = ROWS; tile < WEIGHTS; tile++) shapes.set(tile, AMX_ROWS, INPUTS);
    shapes.set(WEIGHTS, INPUTS / 4, LINE);
    amx_begin(shapes);
    typename W::At at(groups_);
    multiply<0>(at, room[0]);
    for (int g = 0; g < groups_; g += W::BLOCK) {
      typename W::At next = at;
      next.next();
      add_groups<0>(at, next, g + W::BLOCK < groups_, room, acc);
      at = next;
    }
    amx_end();
  }

  // Group PART of a block is on its way: starts the one behind it, adds this one.
  template <int PART>
  HEADRACE_INLINE void add_groups(const typename W::At& at, const typename W::At& next, bool more, Group (&room)[2], Sums& acc) {
    Group& group = room[turn_];
    turn_ ^= 1;
    if constexpr (PART + 1 < W::BLOCK) {
      multiply<PART + 1>(at, room[turn_]);
    } else if (more) {
      multiply<0>(next, room[turn_]);
    }
    add<PART>(at, group, acc);
    if constexpr (PART + 1 < W::BLOCK) {
      add_groups<PART + 1>(at, next, more, room, acc);
    }
  }

  template <int PART>
  HEADRACE_INLINE void multiply(const typename W::At& at, Group& group) {
    constexpr int BYTES = W::BLOCK_BYTES / W::BLOCK;  // of a group
    for (int line = 0; line < BYTES; line += LINE) {
      fetch_ahead<1>(strip_ + at.stream() + PART * BYTES + line);
    }
    HEADRACE_UNROLL for (int i = 0; i < GROUP / 4; i++) {
      __m512i word = W::template word<PART>(strip_, at, i);
      if constexpr (W::OFFSET) {
        word = _mm512_xor_si512(word, _mm512_set1_epi8(static_cast<char>(0x80)));  // 128 less, and signed
      }
      _mm512_store_si512(group.weights[i], word);
    }
    multiply_half<0>(group);
    if constexpr (W::HALVES == 2) {
      multiply_half<1>(group);
    }
    ints_ += GROUP * AMX_ROWS;
  }

  template <int HALF>
  HEADRACE_INLINE void multiply_half(Group& group) {
    constexpr int FIRST = SUMS + HALF * PLANES;
    amx_load<WEIGHTS>(group.weights[HALF * INPUTS / 4], LINE);
    amx_load<ROWS>(ints_ + HALF * INPUTS, GROUP);
    amx_zero<FIRST>();
    amx_dot<FIRST, ROWS, WEIGHTS>();
    amx_load<ROWS + 1>(ints_ + plane_ + HALF * INPUTS, GROUP);
    amx_zero<FIRST + 1>();
    amx_dot<FIRST + 1, ROWS + 1, WEIGHTS>();
    amx_store<FIRST + 1>(group.sums[HALF][1], LINE);
    amx_store<FIRST>(group.sums[HALF][0], LINE);
  }

  // The sums of row m as float32, rounded once: a plane's sum needs less than 24 bits.
  template <int HALF>
  HEADRACE_INLINE __m512 sum(const Group& group, int m) const {
    const __m512 first = _mm512_cvtepi32_ps(_mm512_load_si512(group.sums[HALF][0][m]));
    return _mm512_fmadd_ps(first, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(_mm512_load_si512(group.sums[HALF][1][m])));
  }

  template <int PART, int HALF>
  HEADRACE_INLINE void add_half(const typename W::At& at, const Group& group, Sums& acc) const {
    const __m512 scale = W::template scale<PART, HALF>(strip_, at);
    HEADRACE_UNROLL for (int m = 0; m < AMX_ROWS; m++) {
      acc[m] = _mm512_fmadd_ps(_mm512_mul_ps(sum<HALF>(group, m), _mm512_set1_ps(scale_[m])), scale, acc[m]);
    }
  }

  template <int PART>
  HEADRACE_INLINE void add(const typename W::At& at, const Group& group, Sums& acc) {
    add_half<PART, 0>(at, group, acc);
    if constexpr (W::HALVES == 2) {
      add_half<PART, 1>(at, group, acc);
    }
    if constexpr (W::MINIMUM) {
      const __m512 minimum = W::template minimum<PART>(strip_, at);
      HEADRACE_UNROLL for (int m = 0; m < AMX_ROWS; m++) {
        const __m512 inputs = _mm512_set1_ps(scaled_sum_[m]);
        acc[m] = W::SUBTRACTED ? _mm512_fnmadd_ps(minimum, inputs, acc[m]) : _mm512_fmadd_ps(minimum, inputs, acc[m]);
      }
    }
    scale_ += AMX_ROWS;
    scaled_sum_ += AMX_ROWS;
  }

  const uint8_t* strip_;
  int groups_;
  size_t plane_;
  const int8_t* ints_;  // of the group that is multiplied next
  const float* scale_;  // of the group that is added next
  const float* scaled_sum_;
  int turn_ = 0;
};

}  // namespace headrace::cpu
