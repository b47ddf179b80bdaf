// Fetching weights ahead of the tiles, on x86-64.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd.h"

namespace headrace::cpu {

// Bytes that a tile has on their way, of all its streams together: each stream is fetched its share ahead of the loads, into the
// second-level cache. Into the first, or much further ahead, the streams drive each other out; nearer, one stream alone waits.
inline constexpr int FETCH_AHEAD = 6144;

template <int STREAMS>
HEADRACE_INLINE void fetch_ahead(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p + FETCH_AHEAD / STREAMS), _MM_HINT_T1);
}

}  // namespace headrace::cpu
