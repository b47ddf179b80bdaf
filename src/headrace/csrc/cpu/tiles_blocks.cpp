// The fast tiles of weights in blocks of 32: Q8_0, Q4_0, Q4_1, Q4_Z.
#include "tiles_fast.h"

#if HEADRACE_FAST_TILES
namespace headrace::cpu {

Tile find_block_tile(Format format, Rounding rounding, int panel_rows) {
  switch (format) {
    case Format::Q8_0:
      return integer_tile_of<Q8_0Weights>(rounding, panel_rows);
    case Format::Q4_0:
      return integer_tile_of<Q4_0Weights>(rounding, panel_rows);
    case Format::Q4_Z:
      return integer_tile_of<Q4_ZWeights>(rounding, panel_rows);
    default:
      return integer_tile_of<Q4_1Weights>(rounding, panel_rows);
  }
}

}  // namespace headrace::cpu
#endif
