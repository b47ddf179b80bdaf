// The tiles that are written for this instruction set, if it has any; their instances are spread over a few files, which compile
// side by side.
#pragma once

#include "tiles.h"

#if defined(__AVX512VNNI__)
#define HEADRACE_FAST_TILES 1
#include "tiles_avx512.h"
#elif defined(__AVX2__)
#define HEADRACE_FAST_TILES 1
#include "tiles_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#define HEADRACE_FAST_TILES 1
#include "tiles_neon.h"
#else
#define HEADRACE_FAST_TILES 0
#endif

namespace headrace::cpu {

Tile find_float_tile(Format format, int panel_rows);
Tile find_block_tile(Format format, Rounding rounding, int panel_rows);
Tile find_super_tile(Format format, Rounding rounding, int panel_rows);

}  // namespace headrace::cpu
