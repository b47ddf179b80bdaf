// The step that runs, as all its threads read it.
#pragma once

#include <vector>

#include "model.h"
#include "plan.h"
#include "weights.h"

namespace headrace::cpu {

struct Job {
  Job() = default;
  Job(const Step& step, const std::vector<Layer>& layers, AttentionShape shape, int threads);

  // Floats of attention's split parts.
  int64_t num_partials() const;

  const Step* step = nullptr;
  const int64_t* wanted = nullptr;  // null where all rows are wanted, in order
  int num_outputs = 0;
  bool unrelated = false;  // no two rows are of one slot
  std::vector<Query> queries;
  std::vector<Query> wanted_queries;
  std::vector<AttentionPlan> plans;  // one for each window, and one for the last layer's wanted queries
  std::vector<int> layer_plan;       // [num_layers]

 private:
  void list_queries();
  void plan_attention(const std::vector<Layer>& layers, AttentionShape shape, int threads);
};

}  // namespace headrace::cpu
