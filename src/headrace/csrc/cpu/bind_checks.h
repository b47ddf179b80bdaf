// What the binding asks of its callers: that sizes fit each other, that everything is there before a step runs, and that no
// number becomes an address outside of what it indexes. Costs microseconds a step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "formats.h"
#include "model.h"

namespace headrace::cpu {

class BindChecks {
 public:
  BindChecks(const Config& config, const std::vector<int>& windows, const std::vector<int>& rope_kinds) : config_(config) {
    const auto per_layer = [&](const char* name, size_t count) {
      if (count != 0 && count != static_cast<size_t>(config.num_layers)) length(name, count, config.num_layers);
    };
    per_layer("windows", windows.size());
    per_layer("rope_kinds", rope_kinds.size());
    for (int kind : rope_kinds) {
      if (kind != 0 && kind != 1) throw std::invalid_argument("rope_kinds: 0 or 1 of each layer");
    }
    const auto positive = [](const char* name, int64_t value) {
      if (value < 1 || value > 1 << 28) {
        throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) + " is not possible");
      }
    };
    positive("vocab_size", config.vocab_size);
    positive("hidden_size", config.hidden_size);
    positive("num_layers", config.num_layers);
    positive("num_heads", config.num_heads);
    positive("num_kv_heads", config.num_kv_heads);
    positive("head_dim", config.head_dim);
    positive("intermediate_size", config.intermediate_size);
    positive("all heads' size", (int64_t{config.num_heads} + 2 * int64_t{config.num_kv_heads}) * config.head_dim);
    positive("gates' and inputs' size", 2 * int64_t{config.intermediate_size});
    positive("block_size", config.block_size);
    positive("threads", config.threads);
    kinds_ = std::vector<int>(rope_kinds.empty() ? std::vector<int>{0} : rope_kinds);
  }

  const Config& config() const { return config_; }

  static void length(const char* name, size_t is, size_t wanted) {
    if (is != wanted) {
      throw std::invalid_argument(std::string(name) + " has " + std::to_string(is) + " elements, wanted " +
                                  std::to_string(wanted));
    }
  }

  static void output(const char* name, size_t rows, size_t columns, size_t wanted_rows, size_t wanted_columns) {
    if (rows != wanted_rows || columns != wanted_columns) {
      throw std::invalid_argument(std::string(name) + " is " + std::to_string(rows) + " x " + std::to_string(columns) +
                                  ", wanted " + std::to_string(wanted_rows) + " x " + std::to_string(wanted_columns));
    }
  }

  void add_matrix(int layer, MatrixName name, const std::vector<Part>& parts, int inputs) {
    place(layer, name >= MatrixName::HEAD);
    const auto [outputs, wanted_inputs] = shape(name);
    int64_t rows = 0;
    for (const Part& part : parts) {
      if (part.rows < 1) throw std::invalid_argument("a part of a matrix has no rows");
      if (raw_block(part.format).inputs == SUPER && inputs % SUPER != 0) {
        throw std::invalid_argument("rows of " + std::to_string(inputs) + " inputs are no whole super-blocks");
      }
      rows += part.rows;
    }
    output("a matrix", rows, inputs, outputs, wanted_inputs);
    if (matrices_.contains({layer, name})) throw std::invalid_argument("a matrix was added before");
  }
  // The model has it now: what could not be had is not asked for rows, nor taken for complete.
  void matrix_added(int layer, MatrixName name, const std::vector<Part>& parts) { matrices_[{layer, name}] = parts; }

  void fill(int layer, MatrixName name, int64_t first_row, int64_t num_rows, int64_t bytes) const {
    const auto found = matrices_.find({layer, name});
    if (found == matrices_.end()) throw std::invalid_argument("rows of a matrix that was not added");
    int64_t start = 0;
    for (const Part& part : found->second) {
      const int64_t end = start + part.rows;
      if (first_row >= start && first_row < end) {
        const bool whole = num_rows % STRIP == 0 || first_row + num_rows == end;
        if ((first_row - start) % STRIP != 0 || num_rows < 1 || first_row + num_rows > end || !whole) break;
        length("a row", bytes, raw_row_bytes(part.format, static_cast<int>(shape(name).second)));
        return;
      }
      start = end;
    }
    throw std::invalid_argument("rows " + std::to_string(first_row) + " + " + std::to_string(num_rows) +
                                " are no strips of 16 rows of one part of the matrix");
  }

  void vector(int layer, VectorName name, int64_t count) const {
    place(layer, name == VectorName::FINAL_NORM);
    const int64_t q = int64_t{config_.num_heads} * config_.head_dim;
    const int64_t kv = int64_t{config_.num_kv_heads} * config_.head_dim;
    switch (name) {
      case VectorName::Q_NORM:
      case VectorName::K_NORM:
        if (count != config_.head_dim) length("a norm of heads", count, name == VectorName::Q_NORM ? q : kv);
        break;
      case VectorName::QKV_BIAS:
        length("a bias", count, q + 2 * kv);
        break;
      case VectorName::GATE_UP_BIAS:
        length("a bias", count, 2 * int64_t{config_.intermediate_size});
        break;
      default:
        length("a norm or bias", count, config_.hidden_size);
    }
  }

  void rope(int kind, int64_t positions, int64_t pairs) const {
    if (kind != 0 && kind != 1) throw std::invalid_argument("kind of rope: 0 or 1");
    if (positions < 1 || positions > 1 << 28 || pairs < 1 || 2 * pairs > config_.head_dim) {
      throw std::invalid_argument("rope tables do not fit the heads");
    }
  }
  void rope_set(int kind, int64_t positions) { rope_positions_[kind] = positions; }

  // Nothing is changed by a cache that is refused.
  void cache(const std::vector<size_t>& keys, const std::vector<size_t>& values) {
    length("keys", keys.size(), config_.num_layers);
    length("values", values.size(), config_.num_layers);
    const int64_t each = block_bytes(config_.cache_format, config_.block_size, config_.num_kv_heads, config_.head_dim);
    const int64_t blocks = static_cast<int64_t>(keys[0]) / each;
    for (const std::vector<size_t>& layers : {keys, values}) {
      for (const size_t bytes : layers) {
        if (blocks < 1 || blocks * each != static_cast<int64_t>(bytes)) {
          throw std::invalid_argument("a layer's cache of " + std::to_string(bytes) + " bytes is not as many blocks of " +
                                      std::to_string(each) + " as the others");
        }
      }
    }
    num_blocks_ = blocks;
  }

  // Whether everything was added that a step reads.
  void complete() const {
    const auto wanted = static_cast<size_t>(config_.num_layers) * NUM_LAYER_MATRICES + 1;
    const size_t embeddings = matrices_.count({-1, MatrixName::EMBEDDING});
    if (matrices_.size() != wanted + embeddings || matrices_.count({-1, MatrixName::HEAD}) == 0) {
      throw std::invalid_argument("the model's matrices are not complete");
    }
  }

  void step(const Step& step, int64_t tables, int64_t table_blocks) const {
    complete();
    if (num_blocks_ < 1) throw std::invalid_argument("no cache was set");
    if (step.num_rows < 1 || step.num_seqs < 1) throw std::invalid_argument("a step without rows");
    const int64_t block_size = config_.block_size;
    int64_t positions = table_blocks * block_size;
    for (int kind : kinds_) positions = std::min(positions, rope_positions_[kind]);
    for (int row = 0; row < step.num_rows; ++row) {
      inside("positions", step.positions[row], positions);
      if (step.slot_mapping[row] != -1) inside("slot_mapping", step.slot_mapping[row], num_blocks_ * block_size);
    }
    for (int row = 0; step.wanted != nullptr && row < step.num_wanted; ++row) {
      inside("wanted", step.wanted[row], step.num_rows);
    }
    if (step.query_start[0] != 0 || step.query_start[step.num_seqs] != step.num_rows) {
      throw std::invalid_argument("query_start does not go from 0 to the number of rows");
    }
    for (int seq = 0; seq < step.num_seqs; ++seq) {
      inside("seq_slots", step.seq_slots[seq], tables);
      const int first = step.query_start[seq];
      const int end = step.query_start[seq + 1];
      if (end <= first || end > step.num_rows) throw std::invalid_argument("query_start: a sequence without rows");
      const int32_t* table = step.block_tables + step.seq_slots[seq] * step.table_stride;
      for (int row = first + 1; row < end; ++row) {
        if (step.positions[row] != step.positions[row - 1] + 1) {
          throw std::invalid_argument("positions: a sequence's rows must follow each other");
        }
      }
      for (int64_t block = 0; block <= step.positions[end - 1] / block_size; ++block) {
        inside("block_tables", table[block], num_blocks_);
      }
    }
  }

 private:
  static void inside(const char* name, int64_t value, int64_t limit) {
    if (value < 0 || value >= limit) {
      throw std::invalid_argument(std::string(name) + " holds " + std::to_string(value) + ", allowed are 0 to " +
                                  std::to_string(limit - 1));
    }
  }

  void place(int layer, bool of_model) const {
    if (of_model ? layer != -1 : (layer < 0 || layer >= config_.num_layers)) {
      throw std::invalid_argument("layer " + std::to_string(layer) + " is not possible here");
    }
  }

  // Outputs and inputs of a matrix.
  std::pair<int64_t, int64_t> shape(MatrixName name) const {
    const int64_t hidden = config_.hidden_size;
    const int64_t q = int64_t{config_.num_heads} * config_.head_dim;
    const int64_t kv = int64_t{config_.num_kv_heads} * config_.head_dim;
    switch (name) {
      case MatrixName::QKV:
        return {q + 2 * kv, hidden};
      case MatrixName::O:
        return {hidden, q};
      case MatrixName::GATE_UP:
        return {2 * int64_t{config_.intermediate_size}, hidden};
      case MatrixName::DOWN:
        return {hidden, config_.intermediate_size};
      default:
        return {config_.vocab_size, hidden};
    }
  }

  Config config_;
  std::vector<int> kinds_;
  std::map<std::pair<int, MatrixName>, std::vector<Part>> matrices_;
  int64_t rope_positions_[2] = {0, 0};
  int64_t num_blocks_ = -1;
};

}  // namespace headrace::cpu
