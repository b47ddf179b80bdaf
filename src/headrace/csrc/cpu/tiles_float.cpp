// The fast tiles of float weights and F8.
#include "tiles_fast.h"
#include "tiles_fp8.h"

#if HEADRACE_FAST_TILES
namespace headrace::cpu {

Tile find_float_tile(Format format, int panel_rows) {
  switch (format) {
    case Format::F32:
      return float_tile_of<F32Weights>(panel_rows);
    case Format::F16:
      return float_tile_of<F16Weights>(panel_rows);
    case Format::F8:
      return tile_of<Fp8Tile>(panel_rows);
    default:
      return bf16_tile_of(panel_rows);
  }
}

}  // namespace headrace::cpu
#endif
