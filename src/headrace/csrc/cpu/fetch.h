// Fetching weights ahead of the tiles, on x86-64.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd.h"

namespace headrace::cpu {

// Bytes that a tile has on their way, of all its streams together: each stream is fetched its share ahead of the loads. Nearer, they
// wait; further ahead, what is fetched is gone again. Into the first-level cache: an AMD Zen 5 does nothing when it is asked for the
// second (prefetcht1, prefetcht2).
inline constexpr int FETCH_AHEAD = 8192;

template <int STREAMS>
HEADRACE_INLINE void fetch_ahead(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p + FETCH_AHEAD / STREAMS), _MM_HINT_T0);
}

}  // namespace headrace::cpu
