// Tiles of attention: scores of a few queries with pages of keys, and values weighted by them.
//
// Every score is one chain of multiply-adds along the dimensions, every output one along the positions, whatever
// queries are beside it.
//
// Queries, weights and sums are float32, and all instruction sets give the same bits; only where keys and values are bfloat16
// and the CPU multiplies pairs of them, queries and weights are rounded to bfloat16 too: that is twice as fast.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kv_page.h"

namespace headrace::cpu {

inline constexpr int PART = 256;
inline constexpr int PART_PAGES = PART / PAGE;

// Queries of a tile: as many sums as the registers hold. Vectors of values of a tile of Q queries, and pages of keys at once.
#if defined(__AVX512F__)
inline constexpr int TILE_QUERIES = 12;
constexpr int value_vectors(int queries) { return queries <= 3 ? 8 : queries <= 6 ? 4 : 2; }
constexpr int key_pages(int queries) { return queries <= 2 ? 4 : 2; }
#else
inline constexpr int TILE_QUERIES = 6;
constexpr int value_vectors(int queries) { return queries <= 1 ? 4 : queries <= 3 ? 2 : 1; }
constexpr int key_pages(int queries) { return queries <= 1 ? 4 : queries <= 3 ? 2 : 1; }
#endif
inline constexpr int MAX_KEY_PAGES = 4;
inline constexpr int PAGES_AHEAD = 4;  // are fetched while one is read
inline constexpr int SCORES = PART + (MAX_KEY_PAGES - 1) * PAGE;  // of a query: a tile may look at pages past the last
inline constexpr int QUERY = MAX_DIM + PAGE;  // from a query to the next, known to the compiler; no power of two, which caches dislike

#if defined(__AVX512BF16__)
inline constexpr bool BF16_DOTS = true;
#else
inline constexpr bool BF16_DOTS = false;
HEADRACE_INLINE Vec dot_bf16_pairs(Vec, float, Vec sums) { return sums; }
HEADRACE_INLINE void store_bf16(uint16_t*, Vec) {}
#endif

// Queries and weights are pairs of bfloat16, each in the place of a float32.
template <CacheFormat F>
inline constexpr bool PAIRED = F == CacheFormat::BF16 && BF16_DOTS;

// One part of one KV head: its pages, and past their end what is read next: after the keys the values.
struct PartPages {
  const uint8_t* keys[PART_PAGES + PAGES_AHEAD + MAX_KEY_PAGES];
  const uint8_t* values[PART_PAGES + PAGES_AHEAD];
  int first = 0;  // pages of the part that some query sees: [first, last)
  int last = 0;
};

// Positions of the part that a row sees: [first, last), counted from the part's first.
struct Span {
  int first = 0;
  int last = 0;
  bool empty() const { return first >= last; }
};

// scores[q * SCORES + 16 p ..] = queries . keys of P pages. queries: [Q][QUERY], dim values or dim / 2 pairs of each.
template <CacheFormat F, int Q, int P>
void score_tile(const uint8_t* const* pages, const uint8_t* const* next, const float* queries, int dim, float* scores) {
  Vec sums[P][Q];
  HEADRACE_UNROLL for (int p = 0; p < P; p++) {
    HEADRACE_UNROLL for (int q = 0; q < Q; q++) sums[p][q] = zero();
  }
  const size_t dim_bytes = Page<F>::bytes(dim) / dim;
  for (int d = 0; d < dim; d += 2) {
    Vec first[P], second[P];
    HEADRACE_UNROLL for (int p = 0; p < P; p++) {
      prefetch(next[p] + d * dim_bytes);
      if constexpr (F == CacheFormat::F32) prefetch(next[p] + (d + 1) * dim_bytes);
      if constexpr (PAIRED<F>) {
        first[p] = load(reinterpret_cast<const float*>(Page<F>::key_pairs(pages[p], d)));
      } else {
        Page<F>::keys(pages[p], d, first[p], second[p]);
      }
    }
    HEADRACE_UNROLL for (int q = 0; q < Q; q++) {
      HEADRACE_UNROLL for (int p = 0; p < P; p++) {
        if constexpr (PAIRED<F>) {
          sums[p][q] = dot_bf16_pairs(first[p], queries[q * QUERY], sums[p][q]);
        } else {
          sums[p][q] = fma(first[p], set1(queries[q * QUERY]), sums[p][q]);
        }
      }
    }
    queries++;
    if constexpr (PAIRED<F>) continue;
    HEADRACE_UNROLL for (int q = 0; q < Q; q++) {
      HEADRACE_UNROLL for (int p = 0; p < P; p++) sums[p][q] = fma(second[p], set1(queries[q * QUERY]), sums[p][q]);
    }
    queries++;
  }
  HEADRACE_UNROLL for (int q = 0; q < Q; q++) {
    HEADRACE_UNROLL for (int p = 0; p < P; p++) store(scores + q * SCORES + p * PAGE, sums[p][q]);
  }
}

template <CacheFormat F, int Q>
void score_pages(const PartPages& pages, const float* queries, int dim, float* scores) {
  constexpr int P = key_pages(Q);
  for (int page = pages.first; page < pages.last; page += P) {
    score_tile<F, Q, P>(pages.keys + page, pages.keys + page + PAGES_AHEAD, queries, dim, scores + page * PAGE);
  }
}

// Sums of a tile: Q queries, V vectors of dimensions.
template <CacheFormat F, int Q, int V>
struct ValueTile {
  const PartPages& pages;
  const float* weights;
  int dim;
  int d;
  Vec sums[Q][V];

  HEADRACE_INLINE void add(const Vec (&values)[V], int weight) {
    HEADRACE_UNROLL for (int q = 0; q < Q; q++) {
      const Vec w = set1(weights[q * SCORES + weight]);
      HEADRACE_UNROLL for (int v = 0; v < V; v++) sums[q][v] = fma(values[v], w, sums[q][v]);
    }
  }

  HEADRACE_INLINE void position(int i) {
    Vec values[V];
    HEADRACE_UNROLL for (int v = 0; v < V; v++) values[v] = Page<F>::values(pages.values[i / PAGE], i % PAGE, dim, d + v * LANES);
    add(values, i);
  }

  // Positions 2 i and 2 i + 1.
  HEADRACE_INLINE void pair(int i) {
    const uint16_t* at = Page<F>::value_pairs(pages.values[i / (PAGE / 2)], i % (PAGE / 2), dim, d);
    Vec first[V], second[V];
    if constexpr (PAIRED<F>) {
      HEADRACE_UNROLL for (int v = 0; v < V; v++) first[v] = load(reinterpret_cast<const float*>(at) + v * LANES);
      HEADRACE_UNROLL for (int q = 0; q < Q; q++) {
        HEADRACE_UNROLL for (int v = 0; v < V; v++) sums[q][v] = dot_bf16_pairs(first[v], weights[q * SCORES + i], sums[q][v]);
      }
    } else {
      HEADRACE_UNROLL for (int v = 0; v < V; v++) load_bf16_pairs(at + 2 * v * LANES, first[v], second[v]);
      add(first, 2 * i);
      add(second, 2 * i + 1);
    }
  }

  // One position of a pair whose other one is not seen, and may be anything.
  HEADRACE_INLINE void half(int i) {
    const uint16_t* at = Page<F>::value_pairs(pages.values[i / PAGE], i % PAGE / 2, dim, d);
    Vec values[2][V];
    HEADRACE_UNROLL for (int v = 0; v < V; v++) load_bf16_pairs(at + 2 * v * LANES, values[0][v], values[1][v]);
    if constexpr (PAIRED<F>) {
      HEADRACE_UNROLL for (int q = 0; q < Q; q++) {
        const Vec w = set1(bf16_to_float(reinterpret_cast<const uint16_t*>(weights + q * SCORES)[i]));
        HEADRACE_UNROLL for (int v = 0; v < V; v++) sums[q][v] = fma(i % 2 ? values[1][v] : values[0][v], w, sums[q][v]);
      }
    } else {
      add(values[i % 2], i);
    }
  }
};

// out[q * dim + 16 v ..] += sum over the span's positions of weights[q * SCORES + position] * values
template <CacheFormat F, int Q, int V>
void value_tile(const PartPages& pages, Span span, const float* weights, int dim, int d, float* out) {
  ValueTile<F, Q, V> tile{pages, weights, dim, d};
  HEADRACE_UNROLL for (int q = 0; q < Q; q++) {
    HEADRACE_UNROLL for (int v = 0; v < V; v++) tile.sums[q][v] = load(out + q * dim + d + v * LANES);
  }
  constexpr int STEP = F == CacheFormat::BF16 ? 2 : 1;
  constexpr size_t BYTES = (F == CacheFormat::F32 ? 4 : F == CacheFormat::BF16 ? 2 : 1) * STEP;  // of a dimension in a step
  int i = span.first;
  if constexpr (STEP == 2) {
    if (i % 2 != 0) tile.half(i++);
  }
  for (; i + STEP <= span.last; i += STEP) {
    const uint8_t* next = pages.values[i / PAGE + PAGES_AHEAD] + (i % PAGE / STEP * dim + d) * BYTES;
    HEADRACE_UNROLL for (size_t byte = 0; byte < V * LANES * BYTES; byte += 64) prefetch(next + byte);
    if constexpr (STEP == 2) {
      tile.pair(i / 2);
    } else {
      tile.position(i);
    }
  }
  if constexpr (STEP == 2) {
    if (i < span.last) tile.half(i);
  }
  HEADRACE_UNROLL for (int q = 0; q < Q; q++) {
    HEADRACE_UNROLL for (int v = 0; v < V; v++) store(out + q * dim + d + v * LANES, tile.sums[q][v]);
  }
}

// The dimensions from d on that fill no vector, one by one in the same order.
template <CacheFormat F>
void value_rest(const PartPages& pages, Span span, const float* weights, int queries, int dim, int d, float* out) {
  for (int q = 0; q < queries; q++) {
    const float* w = weights + q * SCORES;
    for (int e = d; e < dim; e++) {
      float sum = out[q * dim + e];
      for (int i = span.first; i < span.last; i++) {
        const float weight = PAIRED<F> ? bf16_to_float(reinterpret_cast<const uint16_t*>(w)[i]) : w[i];
        sum = __builtin_fmaf(Page<F>::value(pages.values[i / PAGE], i % PAGE, dim, e), weight, sum);
      }
      out[q * dim + e] = sum;
    }
  }
}

template <CacheFormat F, int Q>
void add_values(const PartPages& pages, Span span, const float* weights, int dim, float* out) {
  constexpr int V = value_vectors(Q);
  int d = 0;
  for (; d + V * LANES <= dim; d += V * LANES) value_tile<F, Q, V>(pages, span, weights, dim, d, out);
  if constexpr (V > 4) {
    for (; d + 4 * LANES <= dim; d += 4 * LANES) value_tile<F, Q, 4>(pages, span, weights, dim, d, out);
  }
  if constexpr (V > 1) {
    for (; d + LANES <= dim; d += LANES) value_tile<F, Q, 1>(pages, span, weights, dim, d, out);
  }
  if (d < dim) value_rest<F>(pages, span, weights, Q, dim, d, out);
}

// Calls function.operator()<Q>() for tiles of up to TILE_QUERIES that cover `queries`, with each tile's first query.
template <class Function>
void each_tile(int queries, Function function) {
  for (int first = 0; first < queries;) {
    const int left = queries - first;
    switch (std::min(left, TILE_QUERIES)) {
#define HEADRACE_TILE(Q)                     \
  case Q:                                    \
    function.template operator()<Q>(first); \
    first += Q;                              \
    break;
      HEADRACE_TILE(1)
      HEADRACE_TILE(2)
      HEADRACE_TILE(3)
      HEADRACE_TILE(4)
      HEADRACE_TILE(5)
      HEADRACE_TILE(6)
#if defined(__AVX512F__)
      HEADRACE_TILE(7)
      HEADRACE_TILE(8)
      HEADRACE_TILE(9)
      HEADRACE_TILE(10)
      case 11:  // no shape needs it: ten and one
        function.template operator()<10>(first);
        first += 10;
        break;
      HEADRACE_TILE(12)
#endif
#undef HEADRACE_TILE
    }
  }
}

}  // namespace headrace::cpu
