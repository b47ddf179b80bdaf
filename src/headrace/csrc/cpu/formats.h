// How rows of weights are stored: as the files have them ("raw"), and packed for the products.
//
// PACKED. A strip is 16 rows; a 32-bit lane is one row, four bytes of a lane are inputs that follow each other, so an output
// is one lane of one register from start to end. Every raw format keeps its own bits: packing moves whole 32-bit words
// (16-bit ones for F16), nothing is decoded. G groups of 32 inputs in a row, S super-blocks of 256:
//
//   F32    [inputs][16] float                             F16   [inputs][16] half         BF16  [inputs / 2][16][2]
//   Q8_0   scales [G][16] half, then [G] of bytes [8][16][4]: q + 128
//   Q4_0   scales [G][16] half, then [G] of nibbles [4][16][4]: low of word j are inputs 4j.., high 16 + 4j..
//   Q4_1   [G] of nibbles as Q4_0, scales [16] half, minima [16] half
//   Q4_Z   as Q4_1, with addends in the place of minima
//   F8     [G] of scales [16] float, then e4m3 [32][16]
//   Q4_K   [S] of d [16] half, dmin [16] half, scales [8][16] byte, minima [8][16] byte, four times nibbles [8][16][4]: low of
//          word j are inputs 4j.. of group 2i, high of group 2i + 1
//   Q5_K   as Q4_K, with the fifth bits [8][16][4] before the nibbles: bit g of word j are inputs 4j.. of group g
//   Q6_K   [S] of d [16] half, 32 bytes unused, scales [16][16] int8, twice: nibbles [16][16][4] (low: groups 0, 1; high: 2, 3),
//          upper bits [8][16][4]: bits 2g and 2g + 1 of word j are inputs 4j.. of group g
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "model.h"

namespace headrace::cpu {

inline constexpr int STRIP = 16;   // rows of a strip
inline constexpr int GROUP = 32;   // inputs that share a scale
inline constexpr int SUPER = 256;  // inputs of a super-block of Q4_K, Q5_K, Q6_K
inline constexpr int LINE = 64;    // bytes

inline constexpr int Q4_1_GROUP_BYTES = 320;
inline constexpr int F8_GROUP_BYTES = LINE + GROUP * STRIP;
inline constexpr int K_HEADER_BYTES = 320;  // what precedes the quants in a packed super-block
inline constexpr int Q4_K_SUPER_BYTES = K_HEADER_BYTES + 2048;
inline constexpr int Q5_K_SUPER_BYTES = K_HEADER_BYTES + 512 + 2048;
inline constexpr int Q6_K_SUPER_BYTES = K_HEADER_BYTES + 1024 + 2048;
inline constexpr int Q6_K_HALF_BYTES = 1024 + 512;

constexpr size_t to_multiple(size_t n, size_t step) {
  return (n + step - 1) / step * step;
}

constexpr bool is_float(Format format) {
  return format == Format::F32 || format == Format::F16 || format == Format::BF16;
}

// Whether inputs are multiplied as floats whatever Rounding says.
constexpr bool takes_floats(Format format) {
  return is_float(format) || format == Format::F8;
}

// Inputs and bytes of a block of a raw row; a float is a block of one.
struct Block {
  int inputs;
  int bytes;
};

constexpr Block raw_block(Format format) {
  switch (format) {
    case Format::F32:
      return {1, 4};
    case Format::F16:
    case Format::BF16:
      return {1, 2};
    case Format::Q8_0:
      return {32, 34};
    case Format::Q4_0:
      return {32, 18};
    case Format::Q4_1:
    case Format::Q4_Z:
      return {32, 20};
    case Format::F8:
      return {32, 36};
    case Format::Q4_K:
      return {SUPER, 144};
    case Format::Q5_K:
      return {SUPER, 176};
    case Format::Q6_K:
      return {SUPER, 210};
  }
  throw std::invalid_argument("unknown format of weights");
}

// The last block of a row may be filled up with zeros.
constexpr size_t raw_row_bytes(Format format, int inputs) {
  const Block block = raw_block(format);
  return static_cast<size_t>((inputs + block.inputs - 1) / block.inputs) * block.bytes;
}

// What a row of inputs is filled up to with zeros.
constexpr int padded_inputs(int inputs) {
  return static_cast<int>(to_multiple(inputs, GROUP));
}

// Where the quants of a packed strip begin whose scales lie before all of them (Q8_0, Q4_0).
constexpr size_t scales_bytes(int groups) {
  return to_multiple(static_cast<size_t>(groups) * STRIP * 2, LINE);
}

// `inputs` of Q4_K, Q5_K and Q6_K is a multiple of SUPER.
constexpr size_t strip_bytes(Format format, int inputs) {
  const size_t padded = padded_inputs(inputs);
  const size_t groups = padded / GROUP;
  switch (format) {
    case Format::F32:
      return padded * STRIP * 4;
    case Format::F16:
    case Format::BF16:
      return padded * STRIP * 2;
    case Format::Q8_0:
      return scales_bytes(groups) + groups * 512;
    case Format::Q4_0:
      return scales_bytes(groups) + groups * 256;
    case Format::Q4_1:
    case Format::Q4_Z:
      return groups * Q4_1_GROUP_BYTES;
    case Format::F8:
      return groups * F8_GROUP_BYTES;
    case Format::Q4_K:
      return groups / 8 * Q4_K_SUPER_BYTES;
    case Format::Q5_K:
      return groups / 8 * Q5_K_SUPER_BYTES;
    case Format::Q6_K:
      return groups / 8 * Q6_K_SUPER_BYTES;
  }
  throw std::invalid_argument("unknown format of weights");
}

}  // namespace headrace::cpu
