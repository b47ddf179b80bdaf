// Raw rows to packed strips and back; floats to raw blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace headrace::cpu {

// Packs up to 16 rows that lie one after another as in a file into a strip; `strip` was zero before and lanes that get no
// row stay so.
void pack_strip(Format format, const uint8_t* raw, int rows, int inputs, uint8_t* strip);

// One row of a strip in float32: out[padded_inputs(inputs)]. Bit-equal to what headrace.model.formats.blocks decodes.
void unpack_row(Format format, const uint8_t* strip, int lane, int inputs, float* out);

// Rows of floats (F32, F16 or BF16) to raw blocks of Q8_0 (symmetric, 127 steps of the largest magnitude) or Q4_1 (16 steps from the
// smallest to the largest value): `out` has raw_row_bytes(to, inputs) a row.
void quantize_rows(Format from, const uint8_t* raw, int rows, int inputs, Format to, uint8_t* out);

float half_to_float(uint16_t half);
// NaNs become 480, as everywhere in this step.
float e4m3_to_float(uint8_t value);
uint16_t float_to_half(float value);

}  // namespace headrace::cpu
