// What attention of a step does: rows into blocks, and blocks into items that threads share.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace headrace::cpu {

// A row that attends.
struct Query {
  int row;  // of the step: whose projection it has
  int position;
  const int32_t* table;  // the blocks of its sequence
};

struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int group() const { return num_heads / num_kv_heads; }
  // Rows that share a pass over a KV head's pages.
  int block_rows() const { return std::max(1, TILE_QUERIES / group()); }
};

class AttentionPlan {
 public:
  static constexpr int ALL_PARTS = -1;
  static constexpr int64_t MAX_PARTIALS = 16 << 20;  // floats of split parts

  struct Block {
    int first;  // query
    int rows;
  };
  struct Item {
    int block;
    int kv_head;
    int part;  // ALL_PARTS: one after the other, merged as they come
  };

  AttentionPlan(const std::vector<Query>& queries, AttentionShape shape, int window, int threads);

  int window() const { return window_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  const std::vector<Item>& items() const { return items_; }
  bool split() const { return split_; }

  int first_part(int position) const { return lowest(position) / PART; }
  int num_parts(int position) const { return position / PART - first_part(position) + 1; }
  // What the query at `position` sees of a part.
  Span span(int position, int part) const {
    return {std::max(0, lowest(position) - part * PART), std::min(PART, position + 1 - part * PART)};
  }

  // Where a query's split parts go: values [head_dim], then the largest score and the sum of weights.
  int64_t partial(int query, int head, int part_index, int parts) const {
    return bases_[query] + (static_cast<int64_t>(head) * parts + part_index) * partial_size();
  }
  int64_t num_partials() const { return num_partials_; }

 private:
  int lowest(int position) const { return window_ > 0 ? std::max(0, position - window_ + 1) : 0; }
  int partial_size() const { return shape_.head_dim + 2; }
  void place_partials(const std::vector<Query>& queries, int threads);
  void make_blocks(const std::vector<Query>& queries);
  void make_items(const std::vector<Query>& queries);

  AttentionShape shape_;
  int window_;
  bool split_ = true;
  int64_t num_partials_ = 0;  // floats
  std::vector<int64_t> bases_;
  std::vector<Block> blocks_;
  std::vector<Item> items_;
};

}  // namespace headrace::cpu
