// The tile of F8 (e4m3 with a scale for each 32 inputs), for all instruction sets: its weights are float32 that are made on the way,
// so its bits are those of F32 with the same weights.
#pragma once

#include "simd.h"
#include "tiles.h"

namespace headrace::cpu {

struct Fp8Tile {
  static constexpr size_t AHEAD = 6144;  // bytes, of all strips together (fetch.h)

  template <int MR, int NR>
  static void run(const uint8_t* const* all, const Panel& panel, float* out) {
    const uint8_t* strips[NR];
    Vec acc[MR][NR];
    HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
      strips[n] = all[n];
      HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
        acc[m][n] = zero();
      }
    }
    const float* x = panel.f32;
    for (int g = 0; g < panel.groups; g++) {
      Vec scales[NR];
      HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
        scales[n] = mul(load(reinterpret_cast<const float*>(strips[n])), set1(256.0f));
        for (int line = 0; line < F8_GROUP_BYTES; line += LINE) {
          prefetch(strips[n] + AHEAD / NR + line);
        }
        strips[n] += LINE;
      }
      for (int k = 0; k < GROUP; k++) {
        HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
          const Vec weights = mul(load_e4m3(strips[n]), scales[n]);
          HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
            acc[m][n] = fma(weights, set1(x[m]), acc[m][n]);
          }
          strips[n] += STRIP;
        }
        x += MR;
      }
    }
    HEADRACE_UNROLL for (int m = 0; m < MR; m++) {
      HEADRACE_UNROLL for (int n = 0; n < NR; n++) {
        store(out + (m * NR + n) * STRIP, acc[m][n]);
      }
    }
  }
};

}  // namespace headrace::cpu
