// One layer's attention: queries and keys from the fused projection, items of the plan, and what the output projection reads.
#pragma once

#include <cstring>
#include <vector>

#include "cache.h"
#include "norm.h"
#include "plan.h"
#include "rope.h"

namespace headrace::cpu {

// A thread's own room.
struct AttentionScratch {
  explicit AttentionScratch(AttentionShape shape) {
    const size_t queries = std::max(TILE_QUERIES, shape.block_rows() * shape.group());
    const size_t dim = round_up(shape.head_dim, LANES);
    head.resize(dim);
    turned.resize(dim);
    packed.resize(QUERY * queries);
    scores.resize(queries * SCORES);
    part_values.resize(queries * dim);
    merged_values.resize(queries * dim);
    tops.resize(queries);
    sums.resize(queries);
    merged.resize(queries);
  }
  std::vector<float> head, turned;  // [dim], room for whole vectors
  std::vector<float> packed;        // [queries][QUERY]
  std::vector<float> scores;
  std::vector<float> part_values, merged_values;  // [queries][dim]
  std::vector<float> tops, sums;
  std::vector<Merged> merged;
};

// Of one layer and step; the same for all threads.
struct LayerAttention {
  AttentionShape shape;
  float scale;
  float softcap;
  float norm_eps;
  const std::vector<float>& q_norm;  // empty, [head_dim] or of the whole projection
  const std::vector<float>& k_norm;
  const Rope& rope;
  LayerCache cache;
  const AttentionPlan& plan;
  const std::vector<Query>& queries;
  const float* qkv;  // [rows][stride]
  size_t qkv_stride;
  const int32_t* positions;
  const int64_t* slot_mapping;
  float* attended;  // [queries][num_heads * head_dim]
  size_t attended_stride;
  float* partials;

  void write_row(int row, int kv_head, AttentionScratch& scratch) const {
    const int64_t slot = slot_mapping[row];
    if (slot < 0) return;
    const float* keys = qkv + row * qkv_stride + shape.num_heads * shape.head_dim;
    const float* values = keys + shape.num_kv_heads * shape.head_dim;
    make_head(keys, shape.num_kv_heads, kv_head, k_norm, positions[row], scratch);
    cache.write(slot, kv_head, scratch.turned.data(), values + kv_head * shape.head_dim);
  }

  // Reads what `run` of this item reads first.
  void prefetch_queries(const AttentionPlan::Item& item) const {
    const AttentionPlan::Block block = plan.blocks()[item.block];
    const size_t size = shape.group() * shape.head_dim;
    for (int i = 0; i < block.rows; i++) {
      const float* heads = qkv + queries[block.first + i].row * qkv_stride + item.kv_head * size;
      prefetch_bytes(reinterpret_cast<const uint8_t*>(heads), size * sizeof(float));
    }
  }

  // With `write` the rows' own keys and values are written by the items that read them first (each row is another sequence).
  void run(const AttentionPlan::Item& item, bool write, AttentionScratch& scratch) const {
    const AttentionPlan::Block block = plan.blocks()[item.block];
    const int last_part = queries[block.first + block.rows - 1].position / PART;
    if (write && (item.part == AttentionPlan::ALL_PARTS || item.part == last_part)) {
      for (int i = 0; i < block.rows; i++) write_row(queries[block.first + i].row, item.kv_head, scratch);
    }
    switch (cache.shape->format) {
      case CacheFormat::F32:
        return run_as<CacheFormat::F32>(item, block, scratch);
      case CacheFormat::BF16:
        return run_as<CacheFormat::BF16>(item, block, scratch);
      case CacheFormat::INT8:
        return run_as<CacheFormat::INT8>(item, block, scratch);
    }
  }

  // A query's outputs [begin, end) of num_heads * head_dim, at `out` or where they already are.
  const float* outputs(int query, int begin, int end, float* out) const {
    const int parts = plan.num_parts(queries[query].position);
    if (!plan.split() || parts == 1) return attended + query * attended_stride + begin;
    const int dim = shape.head_dim;
    for (int head = begin / dim; head * dim < end; head++) {
      const int first = std::max(begin - head * dim, 0);
      const int last = std::min(end - head * dim, dim);
      merge_split(query, head, parts, first, last, out + head * dim + first - begin);
    }
    return out;
  }

 private:
  // A head of one row's projection, normed and rotated, to scratch.turned.
  void make_head(const float* projected, int heads, int head, const std::vector<float>& norm, int position,
                 AttentionScratch& scratch) const {
    const int dim = shape.head_dim;
    const float* x = projected + head * dim;
    if (!norm.empty()) {
      const bool whole = static_cast<int>(norm.size()) != dim;
      const float inverse = whole ? inverse_rms(projected, heads * dim, norm_eps) : inverse_rms(x, dim, norm_eps);
      scale_by_weight(x, inverse, norm.data() + (whole ? head * dim : 0), dim, scratch.head.data());
      x = scratch.head.data();
    }
    rope.rotate(x, position, dim, scratch.turned.data());
  }

  template <CacheFormat F>
  void pack_queries(AttentionPlan::Block block, int kv_head, AttentionScratch& scratch) const {
    const int group = shape.group();
    for (int q = 0; q < block.rows * group; q++) {
      const Query& query = queries[block.first + q / group];
      make_head(qkv + query.row * qkv_stride, shape.num_heads, kv_head * group + q % group, q_norm, query.position, scratch);
      float* out = scratch.packed.data() + q * QUERY;
      for (int d = 0; d < shape.head_dim; d += LANES) {
        const Vec x = mul(load(scratch.turned.data() + d), set1(scale));
        if constexpr (PAIRED<F>) {
          store_bf16(reinterpret_cast<uint16_t*>(out) + d, x);
        } else {
          store(out + d, x);
        }
      }
    }
  }

  // What is read once the queries are packed: the first pages that a query sees of a part.
  void prefetch_keys(const Query& query, int kv_head, int part) const {
    const int block_size = cache.shape->block_size;
    const Span span = plan.span(query.position, part);
    const int end = std::min(span.last, round_up(span.first + 1, PAGE) + (PAGES_AHEAD - 1) * PAGE);
    for (int i = span.first / PAGE * PAGE; i < end; i += PAGE) {
      const int position = part * PART + i;
      const size_t offset = cache.shape->page_offset(query.table[position / block_size], kv_head, position % block_size);
      prefetch_bytes(cache.keys + offset, cache.shape->page_size);
    }
  }

  // The pages of a part that its positions [first, last) are in.
  PartPages part_pages(const int32_t* table, int kv_head, int part, int first, int last) const {
    PartPages pages;
    pages.first = first / PAGE;
    pages.last = (last + PAGE - 1) / PAGE;
    const int block_size = cache.shape->block_size;
    const int position = part * PART + pages.first * PAGE;
    int block = position / block_size;
    int place = position % block_size;
    size_t offset = 0;
    for (int page = pages.first; page < pages.last; page++) {
      offset = cache.shape->page_offset(table[block], kv_head, place);
      pages.keys[page] = cache.keys + offset;
      pages.values[page] = cache.values + offset;
      place += PAGE;
      if (place == block_size) {
        place = 0;
        block++;
      }
    }
    for (int i = 0; i < PAGES_AHEAD; i++) pages.values[pages.last + i] = cache.values + offset;
    for (int i = 0; i < PAGES_AHEAD + MAX_KEY_PAGES; i++) {
      pages.keys[pages.last + i] = pages.values[std::min(pages.first + i, pages.last)];
    }
    return pages;
  }

  template <CacheFormat F>
  void run_as(const AttentionPlan::Item& item, AttentionPlan::Block block, AttentionScratch& scratch) const {
    const int first = plan.first_part(queries[block.first].position);
    const int last = queries[block.first + block.rows - 1].position / PART;
    prefetch_keys(queries[block.first], item.kv_head, item.part != AttentionPlan::ALL_PARTS ? item.part : first);
    pack_queries<F>(block, item.kv_head, scratch);
    if (item.part != AttentionPlan::ALL_PARTS || first == last) {
      const int only = item.part != AttentionPlan::ALL_PARTS ? item.part : first;
      part<F>(item, block, only, scratch);
      keep_part(item.kv_head, block, only, scratch);
      return;
    }
    const int count = block.rows * shape.group();
    for (int q = 0; q < count; q++) scratch.merged[q] = {-std::numeric_limits<float>::infinity(), 0.0f};
    std::fill_n(scratch.merged_values.data(), count * shape.head_dim, 0.0f);
    for (int i = first; i <= last; i++) {
      part<F>(item, block, i, scratch);
      merge(block, i, scratch);
    }
    finish(item, block, scratch);
  }

  template <CacheFormat F>
  void part(const AttentionPlan::Item& item, AttentionPlan::Block block, int index, AttentionScratch& scratch) const {
    Span spans[TILE_QUERIES];
    int first = PART;
    int last = 0;
    for (int i = 0; i < block.rows; i++) {
      spans[i] = plan.span(queries[block.first + i].position, index);
      if (spans[i].empty()) continue;
      first = std::min(first, spans[i].first);
      last = std::max(last, spans[i].last);
    }
    const PartPages pages = part_pages(queries[block.first].table, item.kv_head, index, first, last);
    attend_part<F>(pages, spans, block.rows, shape.group(), {shape.head_dim, softcap}, scratch.packed.data(),
                   scratch.scores.data(), scratch.part_values.data(), scratch.tops.data(), scratch.sums.data());
  }

  // An only part is the query's result, another goes where `outputs` finds it.
  void keep_part(int kv_head, AttentionPlan::Block block, int index, const AttentionScratch& scratch) const {
    const int dim = shape.head_dim;
    const int group = shape.group();
    for (int q = 0; q < block.rows * group; q++) {
      const int query = block.first + q / group;
      const int position = queries[query].position;
      const int head = kv_head * group + q % group;
      const float* values = scratch.part_values.data() + q * dim;
      if (plan.span(position, index).empty()) continue;
      const int parts = plan.num_parts(position);
      if (parts == 1) {
        store_result(query, head, values, scratch.sums[q]);
        continue;
      }
      float* out = partials + plan.partial(query, head, index - plan.first_part(position), parts);
      std::memcpy(out, values, dim * sizeof(float));
      out[dim] = scratch.tops[q];
      out[dim + 1] = scratch.sums[q];
    }
  }

  void merge(AttentionPlan::Block block, int index, AttentionScratch& scratch) const {
    const int dim = shape.head_dim;
    const int group = shape.group();
    for (int q = 0; q < block.rows * group; q++) {
      if (plan.span(queries[block.first + q / group].position, index).empty()) continue;
      merge_part(scratch.merged[q], {scratch.tops[q], scratch.sums[q]}, scratch.part_values.data() + q * dim, dim,
                 scratch.merged_values.data() + q * dim);
    }
  }

  void finish(const AttentionPlan::Item& item, AttentionPlan::Block block, const AttentionScratch& scratch) const {
    const int group = shape.group();
    for (int q = 0; q < block.rows * group; q++) {
      store_result(block.first + q / group, item.kv_head * group + q % group,
                   scratch.merged_values.data() + q * shape.head_dim, scratch.merged[q].sum);
    }
  }

  void store_result(int query, int head, const float* values, float sum) const {
    float* out = attended + query * attended_stride + head * shape.head_dim;
    const float inverse = 1.0f / sum;
    for (int d = 0; d < shape.head_dim; d++) out[d] = values[d] * inverse;
  }

  // Dimensions [begin, end) of a head whose parts lie apart.
  void merge_split(int query, int head, int parts, int begin, int end, float* out) const {
    Merged merged = {-std::numeric_limits<float>::infinity(), 0.0f};
    std::fill_n(out, end - begin, 0.0f);
    for (int i = 0; i < parts; i++) {
      const float* part = partials + plan.partial(query, head, i, parts);
      merge_part(merged, {part[shape.head_dim], part[shape.head_dim + 1]}, part + begin, end - begin, out);
    }
    const float inverse = 1.0f / merged.sum;
    for (int d = 0; d < end - begin; d++) out[d] *= inverse;
  }
};

}  // namespace headrace::cpu
