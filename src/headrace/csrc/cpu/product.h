// Products of a matrix with rows, in units of work that threads share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "matrix.h"
#include "rows.h"
#include "tiles.h"

namespace headrace::cpu {

// A unit is a tile's strips with all panels. They lie a tile's share of the region apart: a thread reads a few long streams, which
// at one row is what the memory is fastest at.
inline int region_units(const Region& region, const Tile& tile) {
  return (region.strips() + tile.strips - 1) / tile.strips;
}

inline int num_units(const Matrix& matrix, const Rows& rows) {
  int units = 0;
  for (const Region& region : matrix.regions()) {
    units += region_units(region, find_tile(region.format, rows.rounding(), rows.panel_rows()));
  }
  return units;
}

// Units that a thread takes at a time: about 32 kB of weights, and four bites a thread or more; one where it takes long by itself.
inline int units_per_bite(const Matrix& matrix, const Rows& rows, int threads) {
  if (rows.panels() >= 8) return 1;
  const int units = num_units(matrix, rows);
  const size_t unit_bytes = std::max<size_t>(1, matrix.bytes() / std::max(1, units));
  const int by_size = static_cast<int>((32 << 10) / unit_bytes);
  return std::max(1, std::min(units / (4 * threads), by_size));
}

// Units [first, last) of one region. Panels go in blocks that fit the second-level cache beside the weights.
template <class Epilogue>
void multiply_region(const Region& region, const Tile& tile, const Rows& rows, int first, int last, Epilogue& epilogue) {
  constexpr size_t CACHE = 384 << 10;
  const int strips = region.strips();
  const int apart = region_units(region, tile);
  const int block = static_cast<int>(std::max<size_t>(1, CACHE / std::max<size_t>(1, rows.panel_bytes())));
  alignas(LINE) float out[MAX_TILE_VECTORS * STRIP];
  for (int first_panel = 0; first_panel < rows.panels(); first_panel += block) {
    const int end_panel = std::min(rows.panels(), first_panel + block);
    for (int unit = first; unit < last; unit++) {
      const uint8_t* tiled[MAX_TILE_STRIPS];
      int count = 0;  // the last units may have less: the tile then repeats one
      for (int n = 0; n < tile.strips; n++) {
        const int strip = unit + n * apart;
        count += strip < strips;
        tiled[n] = region.strip(strip < strips ? strip : unit);
      }
      for (int index = first_panel; index < end_panel; index++) {
        if constexpr (requires { epilogue.prefetch(0, 0); }) {
          for (int row = rows.first_row(index); row < rows.end_row(index); row++) {
            for (int n = 0; n < count; n++) epilogue.prefetch(row, region.first_output + (unit + n * apart) * STRIP);
          }
        }
        tile.run(tiled, rows.panel(index), out);
        const float* values = out;
        for (int row = rows.first_row(index); row < rows.end_row(index); row++, values += tile.strips * STRIP) {
          for (int n = 0; n < count; n++) {
            const int output = (unit + n * apart) * STRIP;
            epilogue(row, region.first_output + output, std::min(STRIP, region.outputs - output), values + n * STRIP);
          }
        }
      }
    }
  }
}

// Units [first, last) of the product. epilogue(row, first output, count <= 16, values[16]) gets each result once;
// prefetch(row, first output) comes before, if it has one.
template <class Epilogue>
void multiply(const Matrix& matrix, const Rows& rows, int first, int last, Epilogue&& epilogue) {
  int before = 0;
  for (const Region& region : matrix.regions()) {
    const Tile tile = find_tile(region.format, rows.rounding(), rows.panel_rows());
    const int units = region_units(region, tile);
    const int from = std::max(first - before, 0);
    const int to = std::min(last - before, units);
    if (from < to) {
      multiply_region(region, tile, rows, from, to, epilogue);
    }
    before += units;
  }
}

}  // namespace headrace::cpu
