// The fast tiles of weights in super-blocks of 256: Q4_K, Q5_K, Q6_K.
#include "tiles_fast.h"

#if HEADRACE_FAST_TILES
namespace headrace::cpu {

Tile find_super_tile(Format format, Rounding rounding, int panel_rows) {
  switch (format) {
    case Format::Q4_K:
      return integer_tile_of<Q4_KWeights>(rounding, panel_rows);
    case Format::Q5_K:
      return integer_tile_of<Q5_KWeights>(rounding, panel_rows);
    default:
      return integer_tile_of<Q6_KWeights>(rounding, panel_rows);
  }
}

}  // namespace headrace::cpu
#endif
