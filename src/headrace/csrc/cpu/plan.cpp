// Blocks and items of a step's attention.
#include "plan.h"

namespace headrace::cpu {

AttentionPlan::AttentionPlan(const std::vector<Query>& queries, AttentionShape shape, int window, int threads)
    : shape_(shape), window_(window) {
  make_blocks(queries);
  place_partials(queries, threads);
  make_items(queries);
}

// Blocks of a long prompt are enough items by themselves: whole, their queries are packed once and nothing is merged later. And the
// parts of very many rows would be too many to keep.
void AttentionPlan::place_partials(const std::vector<Query>& queries, int threads) {
  constexpr size_t ENOUGH = 16;  // items of a thread
  bases_.reserve(queries.size());
  for (const Query& query : queries) {
    bases_.push_back(num_partials_);
    const int parts = num_parts(query.position);
    if (parts > 1) num_partials_ += static_cast<int64_t>(shape_.num_heads) * parts * partial_size();
  }
  const bool enough = blocks_.size() * shape_.num_kv_heads >= ENOUGH * threads && 2 * blocks_.size() <= queries.size();
  if (enough || num_partials_ > MAX_PARTIALS) {
    split_ = false;
    num_partials_ = 0;
  }
}

void AttentionPlan::make_blocks(const std::vector<Query>& queries) {
  const int most = shape_.block_rows();
  for (int i = 0; i < static_cast<int>(queries.size()); i++) {
    const bool follows = i > 0 && blocks_.back().rows < most && queries[i].table == queries[i - 1].table &&
                         queries[i].position == queries[i - 1].position + 1;
    if (follows) {
      blocks_.back().rows++;
    } else {
      blocks_.push_back({i, 1});
    }
  }
}

void AttentionPlan::make_items(const std::vector<Query>& queries) {
  for (int kv_head = 0; kv_head < shape_.num_kv_heads; kv_head++) {
    for (int i = 0; i < static_cast<int>(blocks_.size()); i++) {
      const Block& block = blocks_[i];
      const int first = first_part(queries[block.first].position);
      const int last = queries[block.first + block.rows - 1].position / PART;
      if (!split_ || first == last) {
        items_.push_back({i, kv_head, ALL_PARTS});
        continue;
      }
      for (int part = first; part <= last; part++) items_.push_back({i, kv_head, part});
    }
  }
}

}  // namespace headrace::cpu
