// Which tile multiplies a format on this instruction set.
#include "tiles.h"

#include "tiles_plain.h"

namespace headrace::cpu {

Tile find_tile(Format format, Rounding rounding, int panel_rows) {
  (void)panel_rows;
  return {plain::tile_of(format, rounding), 1};
}

}  // namespace headrace::cpu
