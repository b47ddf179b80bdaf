// Where the rows of a matrix go.
#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "pack.h"
#include "rows.h"

namespace headrace::cpu {

Matrix::Matrix(const Part* parts, int num_parts, int inputs) : inputs_(inputs) {
  for (int i = 0; i < num_parts; i++) {
    const Part& part = parts[i];
    if (part.rows <= 0 || inputs <= 0) {
      throw std::invalid_argument("a matrix needs rows and inputs");
    }
    if (raw_block(part.format).inputs == SUPER && inputs % SUPER != 0) {
      throw std::invalid_argument("rows of this format have a multiple of 256 inputs, not " + std::to_string(inputs));
    }
    if (regions_.empty() || regions_.back().format != part.format) {
      regions_.emplace_back();
      regions_.back().format = part.format;
      regions_.back().strip_bytes = strip_bytes(part.format, inputs);
    }
    Region& region = regions_.back();
    places_.push_back({part, outputs_, static_cast<int>(regions_.size()) - 1, region.strips});
    for (int row = 0; row < part.rows; row += STRIP) {
      region.first_output.push_back(outputs_ + row);
      region.outputs.push_back(std::min(STRIP, part.rows - row));
      region.strips++;
    }
    outputs_ += part.rows;
  }
  for (Region& region : regions_) {
    region.memory = Memory(region.strips * region.strip_bytes);
  }
}

const Matrix::Place& Matrix::place_of(int row) const {
  for (const Place& place : places_) {
    if (row >= place.first_row && row < place.first_row + place.part.rows) {
      return place;
    }
  }
  throw std::invalid_argument("the matrix has no row " + std::to_string(row));
}

void Matrix::fill(int first_row, int num_rows, const uint8_t* raw) {
  const Place& place = place_of(first_row);
  const Region& region = regions_[place.region];
  const int from = first_row - place.first_row;
  const int to = from + num_rows;
  if (from % STRIP != 0 || num_rows < 0 || to > place.part.rows || (to % STRIP != 0 && to != place.part.rows)) {
    throw std::invalid_argument("rows are filled in strips of 16 of a part, or to its end");
  }
  const size_t row_bytes = raw_row_bytes(region.format, inputs_);
  for (int row = from; row < to; row += STRIP) {
    uint8_t* strip = region.memory.data() + (place.first_strip + row / STRIP) * region.strip_bytes;
    pack_strip(region.format, raw + (row - from) * row_bytes, std::min(STRIP, to - row), inputs_, strip);
  }
}

void Matrix::row(int index, float* out) const {
  const Place& place = place_of(index);
  const Region& region = regions_[place.region];
  const int row = index - place.first_row;
  const uint8_t* strip = region.strip(place.first_strip + row / STRIP);
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
    total += region.memory.size();
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
