// M rows of inputs of a product, rounded and laid out for the tiles.
//
// Rows are cut into panels of up to 12 that lie interleaved, so that a tile's operands are broadcasts from consecutive
// addresses. A panel holds its rows in each kind that the matrix's formats ask for. An integer group is 32 inputs that share
// a scale: value = scale * integer, with |integer| <= 127 (INT8) or 32512 (INT16: 256 * high + low, two bytes).
#pragma once

#include <algorithm>
#include <cstdint>

#include "formats.h"

namespace headrace::cpu {

// On x86-64 an INT16 lies as int16: of four inputs the even two, then the odd two. Products of int16 take as many instructions as two
// of bytes would, and leave nothing to put together; AMX has bytes alone.
#if defined(__AVX2__)
inline constexpr bool INT16_PAIRS = true;
#else
inline constexpr bool INT16_PAIRS = false;
#endif

// bfloat16 times bfloat16, or widened weights times float32.
#if defined(__AVX512BF16__)
inline constexpr bool BF16_PRODUCTS = true;
#else
inline constexpr bool BF16_PRODUCTS = false;
#endif

// Rows of a panel: what the tiles are compiled for. As many as the registers hold with one strip of weights.
#if defined(__AVX512F__)
inline constexpr int PANEL_ROWS[] = {1, 2, 3, 4, 6, 8, 12};
#else
inline constexpr int PANEL_ROWS[] = {1, 2, 3, 4, 6};
#endif

// Rows of a panel of INT16 for AMX's tiles, 0: there are none; what it costs, in rows of the others (14 to 19 measured on a Xeon of
// the fourth generation or later, by format and rows). Of INT8 such a panel took 0.84 to 1.9 times as long as the others.
#if defined(__AMX_INT8__) || defined(HEADRACE_AMX_HEADER)
#define HEADRACE_AMX 1
inline constexpr int AMX_ROWS = 16;
#else
#define HEADRACE_AMX 0
inline constexpr int AMX_ROWS = 0;
#endif
inline constexpr int AMX_COST = 16;
inline constexpr int MAX_PANEL_ROWS = 16;

// The kinds of rows, as bits.
inline constexpr unsigned ROWS_F32 = 1;
inline constexpr unsigned ROWS_BF16 = 2;
inline constexpr unsigned ROWS_INT = 4;

constexpr unsigned row_kind(Format format, Rounding rounding) {
  if (format == Format::BF16 && BF16_PRODUCTS) {
    return ROWS_BF16;
  }
  return takes_floats(format) || rounding == Rounding::FLOAT ? ROWS_F32 : ROWS_INT;
}

// One panel, as the tiles read it: the arrays of its kinds, its rows interleaved.
struct Panel {
  int rows;
  int groups;                  // of 32 inputs
  const float* f32;            // [inputs][rows]
  const uint32_t* bf16;        // [inputs / 2][rows]: two inputs
  const int8_t* ints;          // INT8: [inputs / 4][rows][4]. INT16: the high bytes, then the low ones, each like that (with
                               // AMX_ROWS [groups][rows][32]); with INT16_PAIRS [inputs / 4][rows][4] of int16
  const float* scale;          // [groups][rows]
  const float* scaled_sum;     // [groups][rows]: scale * sum of the group's integers
  const int32_t* offset;       // [groups][rows]: -128 * sum of the group's integers
  const int32_t* half_offset;  // [groups][2][rows]: the same of each half of the group
};

// A view of memory that the caller owns: threads that fill one Rows together have a view each, of the same arguments.
class Rows {
 public:
  Rows() = default;
  // `kinds`: Matrix::row_kinds(). `memory`: bytes() of it, aligned to 64.
  Rows(void* memory, int rows, int inputs, unsigned kinds, Rounding rounding);

  // A little more than is needed for `rows`, so that any number of rows up to it fits too.
  static size_t bytes(int rows, int inputs, unsigned kinds, Rounding rounding);

  int rows() const { return rows_; }
  int inputs() const { return inputs_; }
  int panels() const { return panels_; }
  int panel_rows() const { return panel_rows_; }
  int first_row(int panel) const { return panel * panel_rows_; }
  int end_row(int panel) const { return std::min(rows_, (panel + 1) * panel_rows_); }
  size_t panel_bytes() const { return panel_bytes_; }
  Rounding rounding() const { return rounding_; }

  // Rounds inputs [begin, end) of a row; begin is a multiple of 32, and so is end unless it is the row's. values[0] is input
  // `begin`. Rows of a panel share cache lines: threads should divide panels and ranges of inputs, not rows of a panel.
  void put(int row, int begin, int end, const float* values);

  Panel panel(int index) const;

 private:
  void put_groups(uint8_t* panel, int lane, int group, int count, const float* values) const;
  void put_f32(uint8_t* panel, int lane, int group, const float* values) const;
  void put_bf16(uint8_t* panel, int lane, int group, const float* values) const;
  void put_ints(uint8_t* panel, int lane, int group, int count, const float* values) const;

  uint8_t* memory_ = nullptr;
  int rows_ = 0;
  int inputs_ = 0;
  int groups_ = 0;
  int panels_ = 0;
  int panel_rows_ = 1;
  unsigned kinds_ = 0;
  Rounding rounding_ = Rounding::FLOAT;
  size_t panel_bytes_ = 0;
  size_t bf16_at_ = 0;  // where the arrays of a panel begin
  size_t ints_at_ = 0;
  size_t scale_at_ = 0;
};

}  // namespace headrace::cpu
