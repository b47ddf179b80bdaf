// Token ids to the rows that a step begins with.
#pragma once

#include <algorithm>

#include "matrix.h"
#include "simd.h"

namespace headrace::cpu {

// out[hidden_size] = the token's row * scale. An id that is not in the table (a draft model may have fewer than its target)
// gets the row nearest to it.
inline void embed_token(const Matrix& table, int token, float scale, float* out) {
  table.row(std::clamp(token, 0, table.outputs() - 1), out);
  if (scale == 1.0f) return;
  for (int i = 0; i < table.inputs(); i++) out[i] *= scale;
}

}  // namespace headrace::cpu
