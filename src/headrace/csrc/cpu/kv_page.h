// Pages of the KV cache: 16 positions of one head.
//
// A block is [kv_heads][block_size / 16] pages. Keys lie with their positions as lanes, so that one register holds a
// dimension of 16 keys; values lie position by position. Of `dim` dimensions:
//
//   F32    keys [dim][16], values [16][dim] float
//   BF16   keys [dim / 2][16][2], values [8][dim][2]: pairs of dimensions, pairs of positions
//   INT8   keys [dim][16], values [16][dim] int8, then [16] float: a position's scale, its largest magnitude / 127
#pragma once

#include <cmath>
#include <cstring>

#include "model.h"
#include "simd.h"

namespace headrace::cpu {

inline constexpr int PAGE = 16;  // positions
inline constexpr int MAX_DIM = 256;

HEADRACE_INLINE void prefetch_bytes(const uint8_t* first, size_t count) {
  for (size_t byte = 0; byte < count; byte += 64) prefetch(first + byte);
}

template <CacheFormat F>
struct Page;

template <>
struct Page<CacheFormat::F32> {
  static constexpr bool SCALED = false;
  static size_t bytes(int dim) { return static_cast<size_t>(dim) * PAGE * 4; }
  // Dimensions d and d + 1 of 16 keys.
  static HEADRACE_INLINE void keys(const uint8_t* page, int d, Vec& first, Vec& second) {
    const float* p = reinterpret_cast<const float*>(page) + d * PAGE;
    first = load(p);
    second = load(p + PAGE);
  }
  // 16 dimensions of a position's values.
  static HEADRACE_INLINE Vec values(const uint8_t* page, int position, int dim, int d) {
    return load(reinterpret_cast<const float*>(page) + position * dim + d);
  }
  static float value(const uint8_t* page, int position, int dim, int d) {
    return reinterpret_cast<const float*>(page)[position * dim + d];
  }
  static void write_key(uint8_t* page, int dim, int lane, const float* key) {
    float* p = reinterpret_cast<float*>(page) + lane;
    for (int d = 0; d < dim; d++) p[d * PAGE] = key[d];
  }
  static void write_value(uint8_t* page, int dim, int lane, const float* value) {
    std::memcpy(reinterpret_cast<float*>(page) + lane * dim, value, dim * sizeof(float));
  }
};

template <>
struct Page<CacheFormat::BF16> {
  static constexpr bool SCALED = false;
  static size_t bytes(int dim) { return static_cast<size_t>(dim) * PAGE * 2; }
  static HEADRACE_INLINE const uint16_t* key_pairs(const uint8_t* page, int d) {
    return reinterpret_cast<const uint16_t*>(page) + d * PAGE;
  }
  static HEADRACE_INLINE void keys(const uint8_t* page, int d, Vec& first, Vec& second) {
    load_bf16_pairs(key_pairs(page, d), first, second);
  }
  // 16 dimensions of the positions 2 * pair and 2 * pair + 1.
  static HEADRACE_INLINE const uint16_t* value_pairs(const uint8_t* page, int pair, int dim, int d) {
    return reinterpret_cast<const uint16_t*>(page) + 2 * (pair * dim + d);
  }
  static float value(const uint8_t* page, int position, int dim, int d) {
    return bf16_to_float(value_pairs(page, position / 2, dim, d)[position % 2]);
  }
  static void write_key(uint8_t* page, int dim, int lane, const float* key) {
    uint16_t rounded[MAX_DIM];
    for (int d = 0; d < dim; d++) rounded[d] = float_to_bf16(key[d]);
    uint8_t* p = page + lane * 4;
    for (int d = 0; d < dim; d += 2) std::memcpy(p + d * PAGE * 2, rounded + d, 4);
  }
  static void write_value(uint8_t* page, int dim, int lane, const float* value) {
    uint16_t rounded[MAX_DIM];
    for (int d = 0; d < dim; d++) rounded[d] = float_to_bf16(value[d]);
    uint16_t* p = reinterpret_cast<uint16_t*>(page) + lane / 2 * 2 * dim + lane % 2;
    for (int d = 0; d < dim; d++) p[2 * d] = rounded[d];
  }
};

template <>
struct Page<CacheFormat::INT8> {
  static constexpr bool SCALED = true;
  static size_t bytes(int dim) { return static_cast<size_t>(dim) * PAGE + PAGE * 4; }
  static HEADRACE_INLINE void keys(const uint8_t* page, int d, Vec& first, Vec& second) {
    const int8_t* p = reinterpret_cast<const int8_t*>(page) + d * PAGE;
    first = load_int8(p);
    second = load_int8(p + PAGE);
  }
  static HEADRACE_INLINE Vec values(const uint8_t* page, int position, int dim, int d) {
    return load_int8(reinterpret_cast<const int8_t*>(page) + position * dim + d);
  }
  static float value(const uint8_t* page, int position, int dim, int d) {
    return reinterpret_cast<const int8_t*>(page)[position * dim + d];
  }
  static const float* scales(const uint8_t* page, int dim) { return reinterpret_cast<const float*>(page + dim * PAGE); }
  static void write_key(uint8_t* page, int dim, int lane, const float* key) {
    write(page, dim, lane, key, lane, PAGE);
  }
  static void write_value(uint8_t* page, int dim, int lane, const float* value) {
    write(page, dim, lane, value, lane * dim, 1);
  }

 private:
  // An infinity or NaN makes the whole position NaN, as a product with it would.
  static void write(uint8_t* page, int dim, int lane, const float* x, int first, int step) {
    float largest = 0.0f;
    float broken = 0.0f;
    for (int d = 0; d < dim; d++) {
      largest = std::max(largest, std::fabs(x[d]));
      broken += x[d] * 0.0f;
    }
    const float inverse = largest > 1e-30f && broken == 0.0f ? 127.0f / largest : 0.0f;
    int8_t* p = reinterpret_cast<int8_t*>(page) + first;
    for (int d = 0; d < dim; d++) p[d * step] = static_cast<int8_t>(std::nearbyint(broken == 0.0f ? x[d] * inverse : 0.0f));
    const float scale = largest > 1e-30f ? largest / 127.0f + broken : broken;
    std::memcpy(page + dim * PAGE + 4 * lane, &scale, sizeof scale);
  }
};

}  // namespace headrace::cpu
