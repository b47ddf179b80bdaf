// AMX's tile registers in plain C++, for amx.h: what the instructions do by their description, and an end where they would fault.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace headrace::cpu {

struct SoftwareAmx {
  bool begun = false;
  AmxShapes shapes;
  uint8_t tiles[8][16][64];
};
inline thread_local SoftwareAmx software_amx;

inline void amx_must(bool fine, const char* what) {
  if (!fine) {
    std::printf("AMX would fault: %s\n", what);
    std::exit(1);
  }
}

inline void amx_begin(const AmxShapes& shapes) {
  amx_must(shapes.palette == 1 && shapes.start_row == 0, "palette or start row");
  for (int i = 0; i < 16; i++) {
    amx_must(shapes.rows[i] <= 16 && shapes.row_bytes[i] <= 64, "size of a register");
    amx_must((shapes.rows[i] == 0) == (shapes.row_bytes[i] == 0) && (i < 8 || shapes.rows[i] == 0), "register without rows, or too many");
  }
  software_amx.shapes = shapes;
  software_amx.begun = true;
  std::memset(software_amx.tiles, 0, sizeof(software_amx.tiles));
}

inline void amx_end() { software_amx.begun = false; }

inline int amx_rows(int tile) {
  amx_must(software_amx.begun && software_amx.shapes.rows[tile] > 0, "register that is not configured");
  return software_amx.shapes.rows[tile];
}

template <int TILE>
void amx_load(const void* first_row, size_t stride) {
  std::memset(software_amx.tiles[TILE], 0, sizeof(software_amx.tiles[TILE]));
  for (int row = 0; row < amx_rows(TILE); row++) {
    std::memcpy(software_amx.tiles[TILE][row], static_cast<const uint8_t*>(first_row) + row * stride, software_amx.shapes.row_bytes[TILE]);
  }
}

template <int TILE>
void amx_store(void* first_row, size_t stride) {
  for (int row = 0; row < amx_rows(TILE); row++) {
    std::memcpy(static_cast<uint8_t*>(first_row) + row * stride, software_amx.tiles[TILE][row], software_amx.shapes.row_bytes[TILE]);
  }
}

template <int TILE>
void amx_zero() {
  amx_rows(TILE);
  std::memset(software_amx.tiles[TILE], 0, sizeof(software_amx.tiles[TILE]));
}

template <int SUMS, int LEFT, int RIGHT>
void amx_dot() {
  static_assert(SUMS != LEFT && SUMS != RIGHT && LEFT != RIGHT);
  SoftwareAmx& amx = software_amx;
  amx_must(amx_rows(SUMS) == amx_rows(LEFT) && amx.shapes.row_bytes[SUMS] == amx.shapes.row_bytes[RIGHT] &&
               amx.shapes.row_bytes[LEFT] == 4 * amx_rows(RIGHT),
           "operands that do not fit");
  for (int m = 0; m < amx_rows(SUMS); m++) {
    for (int n = 0; n < amx.shapes.row_bytes[SUMS] / 4; n++) {
      int32_t sum;
      std::memcpy(&sum, amx.tiles[SUMS][m] + 4 * n, 4);
      for (int k = 0; k < amx.shapes.row_bytes[LEFT]; k++) {
        sum += static_cast<int8_t>(amx.tiles[LEFT][m][k]) * static_cast<int8_t>(amx.tiles[RIGHT][k / 4][4 * n + k % 4]);
      }
      std::memcpy(amx.tiles[SUMS][m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace headrace::cpu
