// Where the rows of a matrix go.
#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "pack.h"
#include "rows.h"

namespace headrace::cpu {

Matrix::Matrix(const Part* parts, int num_parts, int inputs, Arena& arena) : inputs_(inputs) {
  for (int i = 0; i < num_parts; i++) {
    const Part& part = parts[i];
    if (part.rows <= 0 || inputs <= 0) {
      throw std::invalid_argument("a matrix needs rows and inputs");
    }
    if (raw_block(part.format).inputs == SUPER && inputs % SUPER != 0) {
      throw std::invalid_argument("rows of this format have a multiple of 256 inputs, not " + std::to_string(inputs));
    }
    // A part that fills no whole strips ends its region.
    if (regions_.empty() || regions_.back().format != part.format || regions_.back().outputs % STRIP != 0) {
      regions_.push_back({part.format, outputs_, 0, strip_bytes(part.format, inputs), nullptr});
    }
    regions_.back().outputs += part.rows;
    outputs_ += part.rows;
    part_ends_.push_back(outputs_);
  }
  for (Region& region : regions_) {
    region.data = arena.take(region.bytes());
  }
}

const Region& Matrix::region_of(int row) const {
  for (const Region& region : regions_) {
    if (row >= region.first_output && row < region.first_output + region.outputs) {
      return region;
    }
  }
  throw std::invalid_argument("the matrix has no row " + std::to_string(row));
}

void Matrix::fill(int first_row, int num_rows, const uint8_t* raw) {
  const Region& region = region_of(first_row);
  const int from = first_row - region.first_output;
  const int to = from + num_rows;
  const bool ends_part = std::find(part_ends_.begin(), part_ends_.end(), first_row + num_rows) != part_ends_.end();
  if (from % STRIP != 0 || num_rows < 0 || to > region.outputs || (to % STRIP != 0 && !ends_part)) {
    throw std::invalid_argument("rows are filled in strips of 16 of a part, or to its end");
  }
  const size_t row_bytes = raw_row_bytes(region.format, inputs_);
  for (int row = from; row < to; row += STRIP) {
    pack_strip(region.format, raw + (row - from) * row_bytes, std::min(STRIP, to - row), inputs_, region.strip(row / STRIP));
  }
}

void Matrix::row(int index, float* out) const {
  const Region& region = region_of(index);
  const int row = index - region.first_output;
  const uint8_t* strip = region.strip(row / STRIP);
  if (inputs_ % GROUP == 0) {
    unpack_row(region.format, strip, row % STRIP, inputs_, out);
    return;
  }
  std::vector<float> padded(padded_inputs(inputs_));
  unpack_row(region.format, strip, row % STRIP, inputs_, padded.data());
  std::memcpy(out, padded.data(), inputs_ * sizeof(float));
}

size_t Matrix::bytes() const {
  size_t total = 0;
  for (const Region& region : regions_) {
    total += region.bytes();
  }
  return total;
}

unsigned Matrix::row_kinds(Rounding rounding) const {
  unsigned kinds = 0;
  for (const Region& region : regions_) {
    kinds |= row_kind(region.format, rounding);
  }
  return kinds;
}

}  // namespace headrace::cpu
