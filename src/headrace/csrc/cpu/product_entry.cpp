// Single products and their weights from outside of a model.
#include "product_entry.h"

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "pack.h"
#include "product.h"

namespace headrace::cpu {

namespace {

Matrix packed(const Part* parts, int num_parts, int inputs, const uint8_t* raw, Arena& arena) {
  Matrix matrix(parts, num_parts, inputs, arena);
  int first_row = 0;
  for (int i = 0; i < num_parts; i++) {
    matrix.fill(first_row, parts[i].rows, raw);
    first_row += parts[i].rows;
    raw += raw_row_bytes(parts[i].format, inputs) * parts[i].rows;
  }
  return matrix;
}

}  // namespace

}  // namespace headrace::cpu

using namespace headrace::cpu;

void headrace_quantize_rows(Format from, const uint8_t* raw, int rows, int inputs, Format to, uint8_t* out) {
  quantize_rows(from, raw, rows, inputs, to, out);
}

void headrace_product(const Part* parts, int num_parts, int inputs, const uint8_t* raw, Rounding rounding, const float* x, int rows,
                      float* out) {
  Arena arena;
  const Matrix matrix = packed(parts, num_parts, inputs, raw, arena);
  const unsigned kinds = matrix.row_kinds(rounding);
  const Memory memory(Rows::bytes(rows, inputs, kinds, rounding));
  Rows panels(memory.data(), rows, inputs, kinds, rounding);
  for (int row = 0; row < rows; row++) {
    panels.put(row, 0, inputs, x + static_cast<size_t>(row) * inputs);
  }
  const int units = num_units(matrix, panels);
  const int bite = units_per_bite(matrix, panels, 2);
  for (int unit = 0; unit < units; unit += bite) {
    multiply(matrix, panels, unit, std::min(units, unit + bite), [&](int row, int output, int count, const float* values) {
      std::memcpy(out + static_cast<size_t>(row) * matrix.outputs() + output, values, count * sizeof(float));
    });
  }
}

void headrace_packed_rows(const Part* parts, int num_parts, int inputs, const uint8_t* raw, float* out) {
  Arena arena;
  const Matrix matrix = packed(parts, num_parts, inputs, raw, arena);
  for (int row = 0; row < matrix.outputs(); row++) {
    matrix.row(row, out + static_cast<size_t>(row) * inputs);
  }
}
