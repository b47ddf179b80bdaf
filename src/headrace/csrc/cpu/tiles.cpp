// Which tile multiplies a format on this instruction set.
#include "tiles.h"

#include "tiles_fast.h"
#include "tiles_plain.h"

namespace headrace::cpu {

Tile find_tile(Format format, Rounding rounding, int panel_rows) {
#if HEADRACE_FAST_TILES
  if (takes_floats(format)) {
    return find_float_tile(format, panel_rows);
  }
  if (rounding != Rounding::FLOAT) {
    return raw_block(format).inputs == SUPER ? find_super_tile(format, rounding, panel_rows)
                                             : find_block_tile(format, rounding, panel_rows);
  }
#endif
  return {plain::tile_of(format, rounding), 1};
}

}  // namespace headrace::cpu
