// The buffers of a step. They grow to the largest step asked for, and stay.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attend.h"
#include "memory.h"
#include "weights.h"

namespace headrace::cpu {

// Inputs of a product that every thread rounds for itself, as that costs less than waiting for each other.
inline constexpr int OWN_INPUTS = 4096;

// Floats of a row.
struct RowSizes {
  size_t hidden, qkv, attended, gate_up;
  explicit RowSizes(const Config& c)
      : hidden(round_up(c.hidden_size, LANES)),
        qkv(round_up((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, LANES)),
        attended(round_up(c.num_heads * c.head_dim, LANES)),
        gate_up(round_up(2 * c.intermediate_size, LANES)) {}
};

// A thread's own room.
struct ThreadRoom {
  ThreadRoom(AttentionShape shape, size_t inputs, size_t rows_bytes)
      : attention(shape), values(inputs), rows(rows_bytes) {}
  AttentionScratch attention;
  std::vector<float> values;  // a row, or a piece of one, before it is rounded
  Memory rows;                // inputs that it rounds for itself
};

// What the rounded rows of any matrix take.
inline size_t rows_bytes(const Weights& weights, Rounding rounding, int rows, int wanted) {
  size_t most = 0;
  const auto see = [&](const Matrix& matrix, int count) {
    if (matrix.empty() || count == 0) return;
    most = std::max(most, Rows::bytes(count, matrix.inputs(), matrix.row_kinds(rounding), rounding));
  };
  for (const Layer& layer : weights.layers()) {
    for (const Matrix& matrix : layer.matrices) see(matrix, rows);
  }
  see(weights.head(), wanted);
  return most;
}

// The same of what a thread rounds for itself.
inline size_t own_rows_bytes(const Weights& weights, Rounding rounding) {
  size_t most = 0;
  weights.each_matrix([&](const Matrix& matrix) {
    if (matrix.empty() || matrix.inputs() > OWN_INPUTS) return;
    most = std::max(most, Rows::bytes(OWN_INPUTS / matrix.inputs(), matrix.inputs(), matrix.row_kinds(rounding), rounding));
  });
  return most;
}

class Workspace {
 public:
  explicit Workspace(RowSizes sizes) : sizes_(sizes) {}

  static int64_t bytes(RowSizes sizes, int rows, int wanted, int64_t partials, size_t rounded) {
    const int64_t floats = rows * (2 * sizes.hidden + sizes.qkv + sizes.attended + sizes.gate_up) + wanted * sizes.hidden;
    return (floats + partials) * sizeof(float) + rounded;
  }

  void grow(int rows, int wanted, int64_t partial_floats, size_t rounded_bytes) {
    grow(residual, rows * sizes_.hidden);
    grow(part, rows * sizes_.hidden);
    grow(qkv, rows * sizes_.qkv);
    grow(attended, rows * sizes_.attended);
    grow(gate_up, rows * sizes_.gate_up);
    grow(wanted_residual, wanted * sizes_.hidden);
    grow(partials, partial_floats);
    if (rounded.size() < rounded_bytes) rounded = Memory(rounded_bytes);
  }

  Memory residual;         // the stream that every part of a layer adds to
  Memory wanted_residual;  // the wanted rows of it, in the last layer
  Memory part;             // what a part gives, where a norm follows it
  Memory qkv, attended, gate_up;
  Memory partials;  // attention's parts that are not merged yet
  Memory rounded;   // the inputs of a product

 private:
  static void grow(Memory& memory, size_t floats) {
    if (memory.size() < floats * sizeof(float)) memory = Memory(floats * sizeof(float));
  }
  RowSizes sizes_;
};

}  // namespace headrace::cpu
