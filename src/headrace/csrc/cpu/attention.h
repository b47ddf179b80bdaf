// Causal attention of a block of queries over one KV head's pages, in place.
//
// PARTS. Positions are cut at fixed multiples of 256. Each part is computed alone (scores, their largest, the sum of their
// exponentials, the weighted values), and parts are merged in order. So it does not matter who computes which part, nor what
// else is computed beside it; and a window only leaves out what lies before it.
//
// BLOCKS. The query heads of a KV head, and rows of one sequence at consecutive positions, are the queries of one pass over the
// pages. Every score is one chain of multiply-adds along the dimensions, every output one along the positions, whatever
// queries are beside it.
#pragma once

#include <algorithm>
#include <limits>

#include "activation.h"
#include "attention_tiles.h"

namespace headrace::cpu {

struct Head {
  int dim;
  float softcap;  // 0: none
};

// Scores of one query to weights e^(score - top) in place, in bfloat16 for PAIRED; their sum.
template <CacheFormat F>
float softmax_part(const PartPages& pages, Span span, Head head, float* scores, float& top) {
  const float infinity = std::numeric_limits<float>::infinity();
  const int first_page = span.first / PAGE;
  const int last_page = (span.last + PAGE - 1) / PAGE;
  Vec largest = set1(-infinity);
  for (int page = first_page; page < last_page; page++) {
    Vec s = load(scores + page * PAGE);
    if constexpr (Page<F>::SCALED) s = mul(s, load(Page<F>::scales(pages.keys[page], head.dim)));
    if (head.softcap != 0.0f) s = soft_cap(s, head.softcap);
    const int begin = std::max(span.first - page * PAGE, 0);
    const int end = std::min(span.last - page * PAGE, PAGE);
    if (begin > 0 || end < PAGE) s = keep_lanes(s, begin, end, set1(-infinity));
    largest = max(largest, s);
    if (Page<F>::SCALED || head.softcap != 0.0f) store(scores + page * PAGE, s);
  }
  top = reduce_max(largest);
  const Vec highest = set1(top);
  Vec sum = zero();
  for (int page = first_page; page < last_page; page++) {
    Vec e = exp(sub(load(scores + page * PAGE), highest));
    const int begin = std::max(span.first - page * PAGE, 0);
    const int end = std::min(span.last - page * PAGE, PAGE);
    if (begin > 0 || end < PAGE) e = keep_lanes(e, begin, end, zero());
    sum = add(sum, e);
    if constexpr (Page<F>::SCALED) e = mul(e, load(Page<F>::scales(pages.values[page], head.dim)));
    if constexpr (PAIRED<F>) {
      store_bf16(reinterpret_cast<uint16_t*>(scores) + page * PAGE, e);  // before the scores that are still to be read
    } else {
      store(scores + page * PAGE, e);
    }
  }
  return reduce_add(sum);
}

// Attention of rows x group queries over one part. queries: [rows * group][QUERY]; scores: [rows * group][SCORES] of scratch;
// out: [rows * group][dim], tops and sums: [rows * group], left as they are where a row sees nothing of the part.
template <CacheFormat F>
void attend_part(const PartPages& pages, const Span* spans, int rows, int group, Head head, const float* queries, float* scores,
                 float* out, float* tops, float* sums) {
  const int count = rows * group;
  each_tile(count, [&]<int Q>(int first) {
    score_pages<F, Q>(pages, queries + first * QUERY, head.dim, scores + first * SCORES);
  });
  Span common = spans[0];
  for (int row = 0; row < rows; row++) {
    if (!spans[row].empty()) {
      for (int q = row * group; q < (row + 1) * group; q++) {
        sums[q] = softmax_part<F>(pages, spans[row], head, scores + q * SCORES, tops[q]);
        std::fill_n(out + q * head.dim, head.dim, 0.0f);
      }
    }
    common.first = std::max(common.first, spans[row].first);
    common.last = std::min(common.last, spans[row].last);
  }
  common.first = round_up(common.first, 2);  // no pair of positions is taken apart
  common.last = common.last / 2 * 2;
  const auto row_values = [&](int row, Span span) {  // no row touches a value that it does not see: it may be NaN
    if (span.empty()) return;
    each_tile(group, [&]<int Q>(int first) {
      const int q = row * group + first;
      add_values<F, Q>(pages, span, scores + q * SCORES, head.dim, out + q * head.dim);
    });
  };
  if (common.empty()) {
    for (int row = 0; row < rows; row++) row_values(row, spans[row]);
    return;
  }
  for (int row = 0; row < rows; row++) row_values(row, {spans[row].first, common.first});
  each_tile(count, [&]<int Q>(int first) {
    add_values<F, Q>(pages, common, scores + first * SCORES, head.dim, out + first * head.dim);
  });
  for (int row = 0; row < rows; row++) row_values(row, {common.last, spans[row].last});
}

// What one query has of the parts so far: values weighted by e^(score - top), and the sum of the weights.
struct Merged {
  float top;
  float sum;
};

// Merges one part's values[count] into what was before it.
inline void merge_part(Merged& merged, Merged part, const float* values, int count, float* out) {
  const float top = part.top > merged.top ? part.top : merged.top;
  float before[LANES], now[LANES];
  store(before, exp(set1(merged.top - top)));
  store(now, exp(set1(part.top - top)));
  for (int d = 0; d < count; d++) out[d] = __builtin_fmaf(values[d], now[0], out[d] * before[0]);
  merged.sum = __builtin_fmaf(part.sum, now[0], merged.sum * before[0]);
  merged.top = top;
}

}  // namespace headrace::cpu
