// One matrix of weights, packed: parts of one format each, as they lie in the file.
#pragma once

#include <cstdint>
#include <vector>

#include "formats.h"
#include "memory.h"

namespace headrace::cpu {

// Neighbouring parts of one format. Where each strip's outputs are is computed, not looked up: at one row a table would be a cache
// miss for every tile.
struct Region {
  Format format;
  int first_output = 0;
  int outputs = 0;
  size_t strip_bytes = 0;
  uint8_t* data = nullptr;

  int strips() const { return (outputs + STRIP - 1) / STRIP; }
  size_t bytes() const { return strips() * strip_bytes; }
  uint8_t* strip(int index) const { return data + index * strip_bytes; }
};

class Matrix {
 public:
  Matrix() = default;
  // Throws std::invalid_argument if rows of a format cannot have as many inputs. The weights live in the arena.
  Matrix(const Part* parts, int num_parts, int inputs, Arena& arena);

  // Rows as the file has them; from a multiple of 16 within a part, to a multiple of 16 or the part's end. Calls for other rows
  // may run at the same time.
  void fill(int first_row, int num_rows, const uint8_t* raw);

  // One row in float32, to out[inputs()]: an embedding.
  void row(int index, float* out) const;

  bool empty() const { return regions_.empty(); }
  int inputs() const { return inputs_; }
  int outputs() const { return outputs_; }
  size_t bytes() const;
  // Which kinds of rows its products read (rows.h).
  unsigned row_kinds(Rounding rounding) const;
  const std::vector<Region>& regions() const { return regions_; }

 private:
  const Region& region_of(int row) const;

  int inputs_ = 0;
  int outputs_ = 0;
  std::vector<Region> regions_;
  std::vector<int> part_ends_;
};

}  // namespace headrace::cpu
