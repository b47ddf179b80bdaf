// The fast tiles of float weights.
#include "tiles_fast.h"

#if HEADRACE_FAST_TILES
namespace headrace::cpu {

Tile find_float_tile(Format format, int panel_rows) {
  switch (format) {
    case Format::F32:
      return float_tile_of<F32Weights>(panel_rows);
    case Format::F16:
      return float_tile_of<F16Weights>(panel_rows);
    default:
      return bf16_tile_of(panel_rows);
  }
}

}  // namespace headrace::cpu
#endif
