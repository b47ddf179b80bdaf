// What the engine keeps of its requests by slot (headrace.kernels.tables), read where it lies: the rows of plain decodes.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "model.h"

namespace headrace::cpu {

using Entries = nanobind::ndarray<int32_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::device::cpu>;  // of a table: entries lie apart

struct SlotTables {
  Entries token_ids;     // [slots, positions]
  Entries block_tables;  // [slots, blocks]
  Column<float> temperature, top_p, min_p;
  Column<int64_t> seed, top_k, sample_index, prompt_len;
  std::vector<int32_t> tokenless;  // ids that no row may draw
};

// The arrays of a step of one token of each of some slots, at these positions, and of its draws. Memory stays from step to step.
class SlotRows {
 public:
  void set(SlotTables tables, int vocab_size) {
    const size_t slots = tables.token_ids.shape(0);
    const auto fits = [&](const char* name, size_t rows) {
      if (rows != slots) throw std::invalid_argument(std::string(name) + " has other slots than token_ids");
    };
    fits("block_tables", tables.block_tables.shape(0));
    for (const Column<float>* column : {&tables.temperature, &tables.top_p, &tables.min_p}) fits("a parameter", column->shape(0));
    for (const Column<int64_t>* column : {&tables.seed, &tables.top_k, &tables.sample_index, &tables.prompt_len}) {
      fits("a parameter", column->shape(0));
    }
    for (const int32_t id : tables.tokenless) {
      if (id < 0 || id >= vocab_size) throw std::invalid_argument("tokenless holds " + std::to_string(id));
    }
    tables_ = std::move(tables);
  }

  size_t num_tables() const { return tables_.block_tables.shape(0); }
  size_t table_blocks() const { return tables_.block_tables.shape(1); }

  // Throws where a slot or position has no place in the tables; what they hold is not looked at.
  Step step(const int32_t* slots, const int32_t* positions, int rows, int block_size) {
    if (!tables_.token_ids.is_valid()) throw std::invalid_argument("no tables were set");
    resize(rows);
    const int64_t places = std::min<int64_t>(tables_.token_ids.shape(1) - 1, int64_t{block_size} * table_blocks());
    for (int row = 0; row < rows; row++) {
      inside("slots", slots[row], num_tables());
      inside("positions", positions[row], places);
      const int32_t* table = tables_.block_tables.data() + slots[row] * tables_.block_tables.stride(0);
      ids_[row] = place(slots[row], positions[row]);
      mapping_[row] = int64_t{table[positions[row] / block_size]} * block_size + positions[row] % block_size;
    }
    Step step;
    step.num_rows = step.num_seqs = rows;
    step.token_ids = ids_.data();
    step.positions = positions;
    step.slot_mapping = mapping_.data();
    step.seq_slots = slots;
    step.query_start = starts_.data();
    step.block_tables = tables_.block_tables.data();
    step.table_stride = tables_.block_tables.stride(0);
    return step;
  }

  // What `step` left in its logits: to be drawn into `ids` and `failed`.
  Draws draws(const Step& step, int vocab_size, float greedy_eps, int32_t* ids, bool* failed) {
    for (int row = 0; row < step.num_rows; row++) {
      const size_t slot = step.seq_slots[row];
      for (const int32_t id : tables_.tokenless) step.logits[int64_t{row} * vocab_size + id] = -std::numeric_limits<float>::infinity();
      temperature_[row] = entry(tables_.temperature, slot);
      top_p_[row] = entry(tables_.top_p, slot);
      min_p_[row] = entry(tables_.min_p, slot);
      top_k_[row] = static_cast<int32_t>(entry(tables_.top_k, slot));
      seed_[row] = entry(tables_.seed, slot);
      sample_index_[row] = static_cast<int32_t>(entry(tables_.sample_index, slot));
      output_index_[row] = step.positions[row] + 1 - entry(tables_.prompt_len, slot);
    }
    return {
        .num_rows = step.num_rows, .logits = step.logits, .temperature = temperature_.data(), .top_k = top_k_.data(),
        .top_p = top_p_.data(), .min_p = min_p_.data(), .seed = seed_.data(), .output_index = output_index_.data(),
        .sample_index = sample_index_.data(), .greedy_eps = greedy_eps, .ids = ids, .failed = failed,
    };
  }

  // Drawn ids become the inputs of the next step.
  void write(const Step& step, const int32_t* ids) {
    for (int row = 0; row < step.num_rows; row++) place(step.seq_slots[row], step.positions[row] + 1) = ids[row];
  }

 private:
  static void inside(const char* name, int64_t value, int64_t limit) {
    if (value < 0 || value >= limit) {
      throw std::invalid_argument(std::string(name) + " holds " + std::to_string(value) + ", allowed are 0 to " +
                                  std::to_string(limit - 1));
    }
  }

  template <typename T>
  static T entry(const Column<T>& column, size_t slot) { return column.data()[slot * column.stride(0)]; }

  int32_t& place(size_t slot, size_t position) const {
    return tables_.token_ids.data()[slot * tables_.token_ids.stride(0) + position];
  }

  void resize(int rows) {
    while (static_cast<int>(starts_.size()) <= rows) starts_.push_back(static_cast<int32_t>(starts_.size()));
    if (static_cast<int>(ids_.size()) >= rows) return;
    for (auto* column : {&temperature_, &top_p_, &min_p_}) column->resize(rows);
    for (auto* column : {&ids_, &top_k_, &sample_index_}) column->resize(rows);
    for (auto* column : {&mapping_, &seed_, &output_index_}) column->resize(rows);
  }

  SlotTables tables_;
  std::vector<float> temperature_, top_p_, min_p_;
  std::vector<int32_t> starts_, ids_, top_k_, sample_index_;
  std::vector<int64_t> mapping_, seed_, output_index_;
};

}  // namespace headrace::cpu
