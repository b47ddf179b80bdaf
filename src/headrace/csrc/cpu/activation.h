// The gated activation of the feed-forward part, and the soft cap of scores and logits.
#pragma once

#include <algorithm>

#include "model.h"
#include "simd.h"

namespace headrace::cpu {

HEADRACE_INLINE Vec silu(Vec x) {
  return mul(x, sigmoid(x));
}

// x (1 + tanh(u)) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
HEADRACE_INLINE Vec gelu_tanh(Vec x) {
  const Vec cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
  return mul(x, sigmoid(mul(cubic, set1(1.5957691216057308f))));
}

// x (1 + erf(x / sqrt(2))) / 2, with the small tail of negative x taken as it is
HEADRACE_INLINE Vec gelu(Vec x) {
  const Vec tail = mul(erfc(mul(abs(x), set1(0.7071067811865476f))), set1(0.5f));
  return mul(x, select_less(x, zero(), tail, sub(set1(1.0f), tail)));
}

HEADRACE_INLINE Vec soft_cap(Vec x, float cap) {
  return mul(tanh(mul(x, set1(1.0f / cap))), set1(cap));
}

template <class Function>
HEADRACE_INLINE void gate_with(Function function, const float* gate, const float* up, int count, size_t next, float* out) {
  for (int i = 0; i < count; i += LANES) {
    prefetch(gate + next + i);
    prefetch(up + next + i);
    const int n = std::min(LANES, count - i);
    if (n == LANES) {
      store(out + i, mul(function(load(gate + i)), load(up + i)));
    } else {
      store_first(out + i, mul(function(load_first(gate + i, n)), load_first(up + i, n)), n);
    }
  }
}

// out[i] = activation(gate[i]) * up[i]. `next`: from here to what is read in the next call, or 0; many rows fit no cache that is near.
inline void gated(Activation activation, const float* gate, const float* up, int count, size_t next, float* out) {
  switch (activation) {
    case Activation::SILU:
      return gate_with([](Vec x) { return silu(x); }, gate, up, count, next, out);
    case Activation::GELU_TANH:
      return gate_with([](Vec x) { return gelu_tanh(x); }, gate, up, count, next, out);
    case Activation::GELU:
      return gate_with([](Vec x) { return gelu(x); }, gate, up, count, next, out);
  }
}

}  // namespace headrace::cpu
