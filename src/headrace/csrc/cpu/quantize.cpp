// Floats to raw blocks of Q8_0 and Q4_1, and smaller floats in plain code.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "pack.h"

namespace headrace::cpu {

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 31;
  const uint32_t fraction = half & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | fraction << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    const float small = std::ldexp(static_cast<float>(fraction), -24);
    return sign != 0 ? -small : small;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) {
    return sign | 0x7e00;
  }
  if (bits >= 0x477ff000) {  // rounds to more than 65504
    return sign | 0x7c00;
  }
  if (bits < 0x38800000) {  // below 2^-14: in steps of 2^-24
    const float size = std::fabs(value);
    return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));
  }
  return sign | static_cast<uint16_t>((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

// A half float with its exponent 8 too large.
float e4m3_to_float(uint8_t value) {
  return half_to_float(static_cast<uint16_t>((value & 0x80) << 8 | (value & 0x7f) << 7)) * 256.0f;
}

namespace {

float raw_float(Format format, const uint8_t* raw, int index) {
  if (format == Format::F32) {
    float value;
    std::memcpy(&value, raw + 4 * static_cast<size_t>(index), 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, raw + 2 * static_cast<size_t>(index), 2);
  if (format == Format::F16) {
    return half_to_float(half);
  }
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The nearest step, where `scale` steps are possible at all.
int step_of(float value, float scale, int lowest, int highest) {
  if (!(scale > 0.0f) || !std::isfinite(value)) {
    return std::clamp(0, lowest, highest);
  }
  return static_cast<int>(std::clamp(std::nearbyint(value / scale), static_cast<float>(lowest), static_cast<float>(highest)));
}

// 0, or NaN where one of a group's values is none: then the whole group is NaN, and who computes with it learns it.
float broken_group(const float* values) {
  float broken = 0.0f;
  for (int i = 0; i < GROUP; i++) {
    broken += values[i] * 0.0f;
  }
  return broken == 0.0f ? 0.0f : NAN;
}

void quantize_q8_0(const float* values, uint8_t* out) {
  float largest = 0.0f;
  for (int i = 0; i < GROUP; i++) {
    largest = std::max(largest, std::fabs(values[i]));
  }
  const uint16_t scale = float_to_half(largest / 127.0f + broken_group(values));
  const float kept = half_to_float(scale);
  std::memcpy(out, &scale, 2);
  for (int i = 0; i < GROUP; i++) {
    out[2 + i] = static_cast<uint8_t>(step_of(values[i], kept, -127, 127));
  }
}

void quantize_q4_1(const float* values, uint8_t* out) {
  const auto [smallest, largest] = std::minmax_element(values, values + GROUP);
  const uint16_t minimum = float_to_half(*smallest + broken_group(values));
  const float kept_minimum = half_to_float(minimum);
  const uint16_t scale = float_to_half((*largest - kept_minimum) / 15.0f);
  const float kept = half_to_float(scale);
  std::memcpy(out, &scale, 2);
  std::memcpy(out + 2, &minimum, 2);
  for (int i = 0; i < 16; i++) {
    const int low = step_of(values[i] - kept_minimum, kept, 0, 15);
    const int high = step_of(values[i + 16] - kept_minimum, kept, 0, 15);
    out[4 + i] = static_cast<uint8_t>(low | high << 4);
  }
}

}  // namespace

void quantize_rows(Format from, const uint8_t* raw, int rows, int inputs, Format to, uint8_t* out) {
  if (!is_float(from) || (to != Format::Q8_0 && to != Format::Q4_1)) {
    throw std::invalid_argument("only floats are quantized, to Q8_0 or Q4_1");
  }
  const size_t row_bytes = raw_row_bytes(from, inputs);
  const int block_bytes = raw_block(to).bytes;
  for (int row = 0; row < rows; row++, raw += row_bytes) {
    for (int k = 0; k < inputs; k += GROUP, out += block_bytes) {
      float values[GROUP] = {};
      for (int i = 0; i < std::min(GROUP, inputs - k); i++) {
        values[i] = raw_float(from, raw, k + i);
      }
      if (to == Format::Q8_0) {
        quantize_q8_0(values, out);
      } else {
        quantize_q4_1(values, out);
      }
    }
  }
}

}  // namespace headrace::cpu
