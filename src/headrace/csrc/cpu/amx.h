// The tile registers of AMX: two-dimensional, 16 rows of 64 bytes; one instruction multiplies two of them. A test puts a header of its
// own in the place of the instructions (HEADRACE_AMX_HEADER).
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace headrace::cpu {

// The sizes of the eight registers, as ldtilecfg reads them.
struct alignas(64) AmxShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int height, int bytes) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(AmxShapes) == 64);

}  // namespace headrace::cpu

#if defined(HEADRACE_AMX_HEADER)
#include HEADRACE_AMX_HEADER
#else

namespace headrace::cpu {

// Assembly, as the compilers' own functions do not say what memory they read and write: gcc has left out stores to it.
HEADRACE_INLINE void amx_begin(const AmxShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
HEADRACE_INLINE void amx_end() { asm volatile("tilerelease" ::: "memory"); }

template <int TILE>
HEADRACE_INLINE void amx_load(const void* first_row, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(first_row), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
HEADRACE_INLINE void amx_store(void* first_row, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(first_row), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
HEADRACE_INLINE void amx_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
// sums[m][n] += the products of signed bytes 4k.. of left[m] with the four of right[k][n].
template <int SUMS, int LEFT, int RIGHT>
HEADRACE_INLINE void amx_dot() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

}  // namespace headrace::cpu
#endif
