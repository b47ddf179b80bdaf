// Rotary position embedding by tables (headrace.model.rope makes them).
#pragma once

#include <cstring>
#include <vector>

#include "simd.h"

namespace headrace::cpu {

struct Rope {
  int half = 0;  // rotated pairs of a head: dimension i with i + half
  int positions = 0;
  std::vector<float> cos, sin;  // [positions][half]

  // A head's `dim` values from x to out, which do not overlap.
  void rotate(const float* x, int position, int dim, float* out) const {
    const float* c = cos.data() + static_cast<size_t>(position) * half;
    const float* s = sin.data() + static_cast<size_t>(position) * half;
    for (int i = 0; i < half; i++) {
      const float a = x[i];
      const float b = x[i + half];
      out[i] = __builtin_fmaf(a, c[i], -(b * s[i]));
      out[i + half] = __builtin_fmaf(b, c[i], a * s[i]);
    }
    std::memcpy(out + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(float));
  }
};

}  // namespace headrace::cpu
