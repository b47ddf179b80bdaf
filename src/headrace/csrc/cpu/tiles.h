// Tiles: the products of one panel of rows with a few strips of weights.
//
// However a tile is cut, an output is the same chain of floats: groups in the order of K, in each
//     out = fma(float(integer sum) * scale of the row, scale of the weights, out), then with a minimum
//     out = fma(minimum, scaled sum of the row, out);
// float weights and F8: out = fma(weight, input, out) for one input after the other. (Where the integers of Q4_0 are 16 times
// and those of Q6_K 4 times as large, the weights' scale is as much smaller: exact.) So a row's bits depend neither on the other rows
// nor, for integer weights, on the instruction set. Only bfloat16 products have the order of their instruction.
#pragma once

#include "formats.h"
#include "rows.h"

namespace headrace::cpu {

// strips[Tile::strips] -> out[panel.rows][Tile::strips][16].
using TileFunction = void (*)(const uint8_t* const* strips, const Panel& panel, float* out);

struct Tile {
  TileFunction run;
  int strips;
};

inline constexpr int MAX_TILE_STRIPS = 2;
inline constexpr int MAX_TILE_VECTORS = 16;  // rows x strips

// `panel_rows`: one of PANEL_ROWS, or AMX_ROWS.
Tile find_tile(Format format, Rounding rounding, int panel_rows);

}  // namespace headrace::cpu
