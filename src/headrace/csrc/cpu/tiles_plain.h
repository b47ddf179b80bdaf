// Tiles in plain code: every format, any instruction set. The faster ones give the same bits; here is what they compute.
#pragma once

#include <cmath>
#include <cstring>

#include "pack.h"
#include "simd.h"
#include "tiles.h"

namespace headrace::cpu::plain {

// 32 inputs of a strip: weight = scale * quant + addend.
struct Group {
  int32_t quants[GROUP][STRIP];
  float scale[2][STRIP];  // of each half; they differ in Q6_K only
  float addend[STRIP];
};

inline float half_at(const uint8_t* p, int lane) {
  uint16_t half;
  std::memcpy(&half, p + lane * 2, 2);
  return half_to_float(half);
}

inline int byte_of(const uint8_t* words, int lane, int index) {
  return words[index / 4 * LINE + lane * 4 + index % 4];
}

inline void decode_q8_0(const uint8_t* strip, int groups, int g, int lane, Group& out) {
  const uint8_t* quants = strip + scales_bytes(groups) + static_cast<size_t>(g) * 512;
  out.scale[0][lane] = out.scale[1][lane] = half_at(strip + static_cast<size_t>(g) * STRIP * 2, lane);
  for (int i = 0; i < GROUP; i++) {
    out.quants[i][lane] = byte_of(quants, lane, i) - 128;
  }
}

inline void decode_q4(const uint8_t* nibbles, int lane, Group& out) {
  for (int i = 0; i < 16; i++) {
    const int byte = byte_of(nibbles, lane, i);
    out.quants[i][lane] = byte & 15;
    out.quants[i + 16][lane] = byte >> 4;
  }
}

inline void decode_q4_0(const uint8_t* strip, int groups, int g, int lane, Group& out) {
  decode_q4(strip + scales_bytes(groups) + static_cast<size_t>(g) * 256, lane, out);
  for (int i = 0; i < GROUP; i++) {
    out.quants[i][lane] = 16 * (out.quants[i][lane] - 8);
  }
  out.scale[0][lane] = out.scale[1][lane] = half_at(strip + static_cast<size_t>(g) * STRIP * 2, lane) * 0.0625f;
}

inline void decode_q4_1(const uint8_t* strip, int g, int lane, Group& out) {
  const uint8_t* at = strip + static_cast<size_t>(g) * Q4_1_GROUP_BYTES;
  decode_q4(at, lane, out);
  out.scale[0][lane] = out.scale[1][lane] = half_at(at + 256, lane);
  out.addend[lane] = half_at(at + 288, lane);
}

inline void decode_q4_z(const uint8_t* strip, int g, int lane, Group& out) {
  decode_q4_1(strip, g, lane, out);
  out.addend[lane] *= out.scale[0][lane];
}

inline void decode_k(bool five, const uint8_t* strip, int g, int lane, Group& out) {
  const uint8_t* at = strip + static_cast<size_t>(g / 8) * (five ? Q5_K_SUPER_BYTES : Q4_K_SUPER_BYTES);
  const uint8_t* fifths = at + K_HEADER_BYTES;
  const uint8_t* nibbles = fifths + (five ? 512 : 0) + g % 8 / 2 * 512;
  const int in_super = g % 8;
  for (int i = 0; i < GROUP; i++) {
    const int byte = byte_of(nibbles, lane, i);
    const int fifth = five ? byte_of(fifths, lane, i) >> in_super & 1 : 0;
    out.quants[i][lane] = (g % 2 == 0 ? byte & 15 : byte >> 4) + 16 * fifth;
  }
  out.scale[0][lane] = out.scale[1][lane] = static_cast<float>(at[64 + in_super * STRIP + lane]) * half_at(at, lane);
  out.addend[lane] = -(static_cast<float>(at[192 + in_super * STRIP + lane]) * half_at(at + 32, lane));
}

inline void decode_q6_k(const uint8_t* strip, int g, int lane, Group& out) {
  const uint8_t* at = strip + static_cast<size_t>(g / 8) * Q6_K_SUPER_BYTES;
  const uint8_t* half = at + K_HEADER_BYTES + g % 8 / 4 * Q6_K_HALF_BYTES;
  const float quarter = half_at(at, lane) * 0.25f;
  for (int i = 0; i < GROUP; i++) {
    const int byte = byte_of(half, lane, g % 2 * GROUP + i);
    const int low = g % 4 < 2 ? byte & 15 : byte >> 4;
    const int high = byte_of(half + 1024, lane, i) >> (g % 4 * 2) & 3;
    out.quants[i][lane] = 4 * ((low | high << 4) - 32);
  }
  for (int h = 0; h < 2; h++) {
    out.scale[h][lane] = static_cast<float>(static_cast<int8_t>(at[64 + (g % 8 * 2 + h) * STRIP + lane])) * quarter;
  }
}

template <Format F>
void decode(const uint8_t* strip, int groups, int g, Group& out) {
  for (int lane = 0; lane < STRIP; lane++) {
    out.addend[lane] = 0.0f;
    if constexpr (F == Format::Q8_0) {
      decode_q8_0(strip, groups, g, lane, out);
    } else if constexpr (F == Format::Q4_0) {
      decode_q4_0(strip, groups, g, lane, out);
    } else if constexpr (F == Format::Q4_1) {
      decode_q4_1(strip, g, lane, out);
    } else if constexpr (F == Format::Q4_Z) {
      decode_q4_z(strip, g, lane, out);
    } else if constexpr (F == Format::Q6_K) {
      decode_q6_k(strip, g, lane, out);
    } else {
      decode_k(F == Format::Q5_K, strip, g, lane, out);
    }
  }
}

// The integer input k of a row.
template <Rounding R>
int32_t integer(const Panel& panel, int row, int k) {
  const size_t word = static_cast<size_t>(k / 4) * panel.rows + row;
  if constexpr (R == Rounding::INT8) {
    return panel.ints[word * 4 + k % 4];
  } else if constexpr (INT16_PAIRS) {
    int16_t value;
    std::memcpy(&value, panel.ints + word * 8 + (k % 2 * 2 + k % 4 / 2) * 2, 2);
    return value;
  } else {
    const size_t plane = static_cast<size_t>(panel.groups) * GROUP * panel.rows;
    return panel.ints[word * 4 + k % 4] * 256 + panel.ints[plane + word * 4 + k % 4];
  }
}

// out += the sum over inputs [from, to) of the group.
template <Rounding R>
void add_integers(const Group& group, const Panel& panel, int g, int row, int from, int to, const float* scale, float* out) {
  int32_t sum[STRIP] = {};
  for (int i = from; i < to; i++) {
    const int32_t x = integer<R>(panel, row, g * GROUP + i);
    for (int lane = 0; lane < STRIP; lane++) {
      sum[lane] += group.quants[i][lane] * x;
    }
  }
  const float row_scale = panel.scale[static_cast<size_t>(g) * panel.rows + row];
  for (int lane = 0; lane < STRIP; lane++) {
    out[lane] = std::fma(static_cast<float>(sum[lane]) * row_scale, scale[lane], out[lane]);
  }
}

template <Format F, Rounding R>
void add_group(const Group& group, const Panel& panel, int g, int row, float* out) {
  constexpr bool HAS_MINIMUM = F == Format::Q4_1 || F == Format::Q4_Z || F == Format::Q4_K || F == Format::Q5_K;
  if constexpr (R == Rounding::FLOAT) {
    for (int i = 0; i < GROUP; i++) {
      const float x = panel.f32[(static_cast<size_t>(g) * GROUP + i) * panel.rows + row];
      for (int lane = 0; lane < STRIP; lane++) {
        const float product = static_cast<float>(group.quants[i][lane]) * group.scale[i / 16][lane];
        out[lane] = std::fma(product + group.addend[lane], x, out[lane]);
      }
    }
    return;
  }
  if constexpr (F == Format::Q6_K) {
    add_integers<R>(group, panel, g, row, 0, 16, group.scale[0], out);
    add_integers<R>(group, panel, g, row, 16, 32, group.scale[1], out);
  } else {
    add_integers<R>(group, panel, g, row, 0, 32, group.scale[0], out);
  }
  if constexpr (HAS_MINIMUM) {
    const float sum = panel.scaled_sum[static_cast<size_t>(g) * panel.rows + row];
    for (int lane = 0; lane < STRIP; lane++) {
      out[lane] = std::fma(group.addend[lane], sum, out[lane]);
    }
  }
}

template <Format F, Rounding R>
void integer_tile(const uint8_t* const* strips, const Panel& panel, float* out) {
  std::memset(out, 0, panel.rows * STRIP * sizeof(float));
  for (int g = 0; g < panel.groups; g++) {
    Group group;
    decode<F>(strips[0], panel.groups, g, group);
    for (int row = 0; row < panel.rows; row++) {
      add_group<F, R>(group, panel, g, row, out + row * STRIP);
    }
  }
}

template <Format F>
float float_weight(const uint8_t* strip, int k, int lane) {
  if constexpr (F == Format::F16) {
    return half_at(strip + static_cast<size_t>(k) * STRIP * 2, lane);
  }
  if constexpr (F == Format::F8) {
    const uint8_t* at = strip + static_cast<size_t>(k / GROUP) * F8_GROUP_BYTES;
    float scale;
    std::memcpy(&scale, at + lane * 4, 4);
    return e4m3_to_float(at[LINE + k % GROUP * STRIP + lane]) * scale;
  }
  uint32_t bits;
  std::memcpy(&bits, strip + static_cast<size_t>(F == Format::F32 ? k : k / 2) * LINE + lane * 4, 4);
  if constexpr (F == Format::BF16) {
    bits = k % 2 == 0 ? bits << 16 : bits & 0xffff0000u;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <Format F>
void float_tile(const uint8_t* const* strips, const Panel& panel, float* out) {
  std::memset(out, 0, panel.rows * STRIP * sizeof(float));
  for (int k = 0; k < panel.groups * GROUP; k++) {
    float weights[STRIP];
    for (int lane = 0; lane < STRIP; lane++) {
      weights[lane] = float_weight<F>(strips[0], k, lane);
    }
    for (int row = 0; row < panel.rows; row++) {
      const float x = panel.f32[static_cast<size_t>(k) * panel.rows + row];
      for (int lane = 0; lane < STRIP; lane++) {
        out[row * STRIP + lane] = std::fma(weights[lane], x, out[row * STRIP + lane]);
      }
    }
  }
}

template <Format F>
TileFunction integer_tile_of(Rounding rounding) {
  switch (rounding) {
    case Rounding::FLOAT:
      return integer_tile<F, Rounding::FLOAT>;
    case Rounding::INT16:
      return integer_tile<F, Rounding::INT16>;
    case Rounding::INT8:
      return integer_tile<F, Rounding::INT8>;
  }
  return nullptr;
}

inline TileFunction tile_of(Format format, Rounding rounding) {
  switch (format) {
    case Format::F32:
      return float_tile<Format::F32>;
    case Format::F16:
      return float_tile<Format::F16>;
    case Format::BF16:
      return float_tile<Format::BF16>;
    case Format::Q8_0:
      return integer_tile_of<Format::Q8_0>(rounding);
    case Format::Q4_0:
      return integer_tile_of<Format::Q4_0>(rounding);
    case Format::Q4_1:
      return integer_tile_of<Format::Q4_1>(rounding);
    case Format::Q4_Z:
      return integer_tile_of<Format::Q4_Z>(rounding);
    case Format::F8:
      return float_tile<Format::F8>;
    case Format::Q4_K:
      return integer_tile_of<Format::Q4_K>(rounding);
    case Format::Q5_K:
      return integer_tile_of<Format::Q5_K>(rounding);
    case Format::Q6_K:
      return integer_tile_of<Format::Q6_K>(rounding);
  }
  return nullptr;
}

}  // namespace headrace::cpu::plain
