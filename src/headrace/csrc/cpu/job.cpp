// A step's rows as queries, and the plans of its attention.
#include "job.h"

#include <algorithm>

namespace headrace::cpu {

namespace {

bool all_in_order(const Step& step) {
  if (step.wanted == nullptr) return true;
  if (step.num_wanted != step.num_rows) return false;
  for (int i = 0; i < step.num_wanted; i++) {
    if (step.wanted[i] != i) return false;
  }
  return true;
}

bool all_unrelated(const Step& step) {
  if (step.num_seqs != step.num_rows) return false;
  std::vector<int32_t> slots(step.seq_slots, step.seq_slots + step.num_seqs);
  std::sort(slots.begin(), slots.end());
  return std::adjacent_find(slots.begin(), slots.end()) == slots.end();
}

}  // namespace

Job::Job(const Step& step, const std::vector<Layer>& layers, AttentionShape shape, int threads) : step(&step) {
  wanted = all_in_order(step) ? nullptr : step.wanted;
  num_outputs = wanted == nullptr ? step.num_rows : step.num_wanted;
  unrelated = all_unrelated(step);
  list_queries();
  plan_attention(layers, shape, threads);
}

void Job::list_queries() {
  queries.reserve(step->num_rows);
  for (int seq = 0; seq < step->num_seqs; seq++) {
    const int32_t* table = step->block_tables + step->seq_slots[seq] * step->table_stride;
    for (int row = step->query_start[seq]; row < step->query_start[seq + 1]; row++) {
      queries.push_back({row, step->positions[row], table});
    }
  }
  if (wanted == nullptr) return;
  for (int i = 0; i < num_outputs; i++) wanted_queries.push_back(queries[wanted[i]]);
}

void Job::plan_attention(const std::vector<Layer>& layers, AttentionShape shape, int threads) {
  for (const Layer& layer : layers) {
    const auto same = [&](const AttentionPlan& plan) { return plan.window() == layer.window; };
    const auto found = std::find_if(plans.begin(), plans.end(), same);
    layer_plan.push_back(static_cast<int>(found - plans.begin()));
    if (found == plans.end()) plans.emplace_back(queries, shape, layer.window, threads);
  }
  if (wanted == nullptr) return;
  layer_plan.back() = static_cast<int>(plans.size());
  plans.emplace_back(wanted_queries, shape, layers.back().window, threads);
}

int64_t Job::num_partials() const {
  int64_t most = 0;
  for (const AttentionPlan& plan : plans) most = std::max(most, plan.num_partials());
  return most;
}

}  // namespace headrace::cpu
