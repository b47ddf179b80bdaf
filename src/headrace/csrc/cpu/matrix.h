// One matrix of weights, packed: parts of one format each, as they lie in the file.
#pragma once

#include <cstdint>
#include <vector>

#include "formats.h"
#include "memory.h"

namespace headrace::cpu {

// Neighbouring parts of one format: strips of one size.
struct Region {
  Format format;
  int strips = 0;
  size_t strip_bytes = 0;
  Memory memory;
  std::vector<int> first_output;  // [strips]
  std::vector<int> outputs;       // [strips]: 16, or what is left of the part

  const uint8_t* strip(int index) const { return memory.data() + index * strip_bytes; }
};

class Matrix {
 public:
  Matrix() = default;
  // Throws std::invalid_argument if `inputs` rows of a format cannot be.
  Matrix(const Part* parts, int num_parts, int inputs);

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
  struct Place {
    Part part;
    int first_row;
    int region;
    int first_strip;
  };
  const Place& place_of(int row) const;

  int inputs_ = 0;
  int outputs_ = 0;
  std::vector<Region> regions_;
  std::vector<Place> places_;
};

}  // namespace headrace::cpu
