// What products do with what they give: store it, or add it to the residual stream; with a bias or without.
#pragma once

#include "activation.h"
#include "simd.h"

namespace headrace::cpu {

struct StoreRows {
  float* out;
  size_t stride;
  const float* bias;
  HEADRACE_INLINE void operator()(int row, int first, int count, const float* values) const {
    float* at = out + row * stride + first;
    Vec v = load(values);
    if (bias != nullptr) v = add(v, load_first(bias + first, count));
    if (count == LANES) return store(at, v);
    store_first(at, v, count);
  }
};

struct AddRows {
  float* sum;
  size_t stride;
  const float* bias;
  float scale;
  // With many rows each line is far from the one before, and out of the caches.
  HEADRACE_INLINE void prefetch(int row, int first) const { cpu::prefetch(sum + row * stride + first); }
  HEADRACE_INLINE void operator()(int row, int first, int count, const float* values) const {
    float* at = sum + row * stride + first;
    Vec v = load(values);
    if (bias != nullptr) v = add(v, load_first(bias + first, count));
    if (count == LANES) return store(at, fma(v, set1(scale), load(at)));
    store_first(at, fma(v, set1(scale), load_first(at, count)), count);
  }
};

struct StoreLogits {
  float* out;
  size_t stride;
  float scale;
  float softcap;
  HEADRACE_INLINE void operator()(int row, int first, int count, const float* values) const {
    Vec v = load(values);
    if (scale != 1.0f) v = mul(v, set1(scale));
    if (softcap != 0.0f) v = soft_cap(v, softcap);
    float* at = out + row * stride + first;
    if (count == LANES) return store(at, v);
    store_first(at, v, count);
  }
};

}  // namespace headrace::cpu
