// The tiles of AMX beside the plain tiles: the same bits, or it says where not and exits with 1. The registers are in software, but
// for a program that is compiled for a CPU with AMX (-mamx-tile -mamx-int8).
#if !defined(__AMX_INT8__)
#define HEADRACE_AMX_HEADER "amx_in_software.h"
#endif

#include <cstdint>
#include <cstdio>
#include <vector>

#include "cpu_features.h"
#include "matrix.cpp"
#include "pack.cpp"
#include "quantize.cpp"
#include "rows.cpp"
#include "tiles_avx512.h"
#include "tiles_plain.h"

using namespace headrace::cpu;

namespace {

uint64_t state = 1;
uint32_t bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}

Rows rounded(const Memory& memory, const float* x, int rows, const Matrix& matrix, Rounding rounding) {
  Rows panels(memory.data(), rows, matrix.inputs(), matrix.row_kinds(rounding), rounding);
  for (int row = 0; row < rows; row++) panels.put(row, 0, matrix.inputs(), x + static_cast<size_t>(row) * matrix.inputs());
  return panels;
}

// 27 rows: a panel that is full, and one that is not.
template <class W>
void check(const char* name, Format format, int inputs) {
  constexpr int COUNT = 27;
  const Part part{format, STRIP};
  Arena arena;
  Matrix matrix(&part, 1, inputs, arena);
  std::vector<uint8_t> raw(raw_row_bytes(format, inputs) * STRIP);
  for (uint8_t& byte : raw) byte = static_cast<uint8_t>(bits());
  for (size_t at = 1; at < raw.size(); at += raw_block(format).bytes) {  // halves that are finite: a scale, a minimum, or both
    raw[at] &= 0x9f;
    if (format != Format::Q8_0 && format != Format::Q4_0) raw[at + 2] &= 0x9f;
  }
  for (size_t at = raw_block(format).bytes - 1; at < raw.size(); at += raw_block(format).bytes) raw[at] &= 0x9f;
  matrix.fill(0, STRIP, raw.data());
  const uint8_t* strip = matrix.regions()[0].strip(0);
  std::vector<float> x(static_cast<size_t>(COUNT) * inputs);
  for (float& value : x) value = (static_cast<int>(bits() % 4001) - 2000) / 256.0f * (bits() % 50 == 0 ? 40.0f : 1.0f);
  constexpr Rounding rounding = Rounding::INT16;
  const Memory memory(Rows::bytes(COUNT, inputs, ROWS_INT, rounding));
  const Memory one(Rows::bytes(1, inputs, ROWS_INT, rounding));
  const Rows panels = rounded(memory, x.data(), COUNT, matrix, rounding);
  if (panels.panel_rows() != AMX_ROWS) std::printf("panels of %d rows\n", panels.panel_rows()), std::exit(1);
  for (int row = 0; row < COUNT; row++) {
    alignas(LINE) float want[STRIP], got[AMX_ROWS * STRIP];
    const Rows alone = rounded(one, x.data() + static_cast<size_t>(row) * inputs, 1, matrix, rounding);
    plain::tile_of(format, rounding)(&strip, alone.panel(0), want);
    AmxTile<W>::run(&strip, panels.panel(row / AMX_ROWS), got);
    if (std::memcmp(want, got + row % AMX_ROWS * STRIP, sizeof(want)) != 0 || !(std::abs(want[0]) > 0)) {
      std::printf("%s, row %d: not the bits of the plain tiles\n", name, row);
      std::exit(1);
    }
  }
}

}  // namespace

int main() {
  cpu_features();  // asks the system for the registers
  check<Q8_0Weights>("Q8_0", Format::Q8_0, 7 * GROUP);
  check<Q4_0Weights>("Q4_0", Format::Q4_0, 7 * GROUP);
  check<Q4_1Weights>("Q4_1", Format::Q4_1, 7 * GROUP);
  check<Q4_ZWeights>("Q4_Z", Format::Q4_Z, 7 * GROUP);
  check<Q4_KWeights>("Q4_K", Format::Q4_K, 3 * SUPER);
  check<Q5_KWeights>("Q5_K", Format::Q5_K, 3 * SUPER);
  check<Q6_KWeights>("Q6_K", Format::Q6_K, 3 * SUPER);
}
