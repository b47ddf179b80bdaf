// RMSNorm (Zhang & Sennrich 2019).
#pragma once

#include <cmath>

#include "simd.h"

namespace headrace::cpu {

// 1 / sqrt(mean of squares + eps), with four sums of 16 lanes: always these, in this order.
inline float inverse_rms(const float* x, int count, float eps) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES) {
    HEADRACE_UNROLL for (int j = 0; j < 4; j++) {
      const Vec v = load(x + i + j * LANES);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (int j = 0; i < count; i += LANES, j++) {
    const Vec v = load_first(x + i, std::min(LANES, count - i));
    sums[j] = fma(v, v, sums[j]);
  }
  const float total = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return 1.0f / std::sqrt(total / static_cast<float>(count) + eps);
}

// out[i] = x[i] * scale * weight[i]
inline void scale_by_weight(const float* x, float scale, const float* weight, int count, float* out) {
  const Vec s = set1(scale);
  int i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, mul(mul(load(x + i), s), load(weight + i)));
  for (; i < count; i++) out[i] = x[i] * scale * weight[i];
}

// sum[i] += residual_scale * x[i] / rms(x) * weight[i]: what a part of a layer with a norm after it adds.
inline void add_normed(const float* x, const float* weight, int count, float eps, float residual_scale, float* sum) {
  const float scale = inverse_rms(x, count, eps);
  for (int i = 0; i < count; i++) {
    sum[i] = __builtin_fmaf(residual_scale, x[i] * scale * weight[i], sum[i]);
  }
}

}  // namespace headrace::cpu
