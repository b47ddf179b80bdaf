// Single products and their weights from outside of a model: quantizing at load, tests, the benchmark of the tiles.
#pragma once

#include <cstdint>

#include "model.h"

#define HEADRACE_EXPORT __attribute__((visibility("default")))

extern "C" {
// Floats to raw blocks, as pack.h has it.
HEADRACE_EXPORT void headrace_quantize_rows(headrace::cpu::Format from, const uint8_t* raw, int rows, int inputs,
                                            headrace::cpu::Format to, uint8_t* out);

// x [rows, inputs] times the rows of `parts`, whose raw rows lie one after another -> out [rows, outputs]. One thread.
HEADRACE_EXPORT void headrace_product(const headrace::cpu::Part* parts, int num_parts, int inputs, const uint8_t* raw,
                                      headrace::cpu::Rounding rounding, const float* x, int rows, float* out);

// The packed rows in float32 -> out [outputs, inputs].
HEADRACE_EXPORT void headrace_packed_rows(const headrace::cpu::Part* parts, int num_parts, int inputs, const uint8_t* raw, float* out);
}
