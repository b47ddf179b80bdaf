// Raw rows to packed strips and back; floats to raw blocks. Plain integer code: it runs once, at memory speed or near it.
#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace headrace::cpu {

namespace {

// One 32-bit word of every lane takes a cache line: words of a row go down the lane.
struct Lane {
  uint8_t* strip;
  int lane;

  void words(size_t at, const uint8_t* source, int count, uint32_t flip = 0) const {
    for (int i = 0; i < count; i++) {
      uint32_t word;
      std::memcpy(&word, source + 4 * i, 4);
      word ^= flip;
      std::memcpy(strip + at + static_cast<size_t>(i) * LINE + lane * 4, &word, 4);
    }
  }
  void half(size_t at, const uint8_t* source) const { std::memcpy(strip + at + lane * 2, source, 2); }
  void byte(size_t at, uint8_t value) const { strip[at + lane] = value; }

  uint32_t word(size_t at) const {
    uint32_t value;
    std::memcpy(&value, strip + at + lane * 4, 4);
    return value;
  }
  // Byte `index` of the words that begin at `at`.
  uint8_t byte_of(size_t at, int index) const { return strip[at + static_cast<size_t>(index / 4) * LINE + lane * 4 + index % 4]; }
  float half(size_t at) const {
    uint16_t value;
    std::memcpy(&value, strip + at + lane * 2, 2);
    return half_to_float(value);
  }
  uint8_t byte(size_t at) const { return strip[at + lane]; }
};

void pack_halves(const Lane& out, const uint8_t* raw, int inputs) {
  for (int k = 0; k < inputs; k++) {
    out.half(static_cast<size_t>(k) * STRIP * 2, raw + 2 * k);
  }
}

// Words of floats; the last pair of an odd number of bfloat16 gets a zero.
void pack_words(const Lane& out, const uint8_t* raw, size_t bytes) {
  const size_t whole = bytes / 4;
  out.words(0, raw, static_cast<int>(whole));
  if (bytes % 4 != 0) {
    uint8_t last[4] = {};
    std::memcpy(last, raw + whole * 4, bytes % 4);
    out.words(whole * LINE, last, 1);
  }
}

void pack_q8_0(const Lane& out, const uint8_t* raw, int groups) {
  const size_t quants = scales_bytes(groups);
  for (int g = 0; g < groups; g++, raw += 34) {
    out.half(static_cast<size_t>(g) * STRIP * 2, raw);
    out.words(quants + static_cast<size_t>(g) * 512, raw + 2, 8, 0x80808080u);
  }
}

void pack_q4_0(const Lane& out, const uint8_t* raw, int groups) {
  const size_t quants = scales_bytes(groups);
  for (int g = 0; g < groups; g++, raw += 18) {
    out.half(static_cast<size_t>(g) * STRIP * 2, raw);
    out.words(quants + static_cast<size_t>(g) * 256, raw + 2, 4);
  }
}

void pack_q4_1(const Lane& out, const uint8_t* raw, int groups) {
  for (int g = 0; g < groups; g++, raw += 20) {
    const size_t at = static_cast<size_t>(g) * Q4_1_GROUP_BYTES;
    out.words(at, raw + 4, 4);
    out.half(at + 256, raw);
    out.half(at + 288, raw + 2);
  }
}

void pack_f8(const Lane& out, const uint8_t* raw, int groups) {
  for (int g = 0; g < groups; g++, raw += 36) {
    const size_t at = static_cast<size_t>(g) * F8_GROUP_BYTES;
    out.words(at, raw, 1);
    for (int i = 0; i < GROUP; i++) {
      out.byte(at + LINE + static_cast<size_t>(i) * STRIP, raw[4 + i]);
    }
  }
}

// d, dmin and the 12 bytes of eight 6-bit scales and minima, which Q4_K and Q5_K share.
void pack_k_header(const Lane& out, size_t at, const uint8_t* raw) {
  out.half(at, raw);
  out.half(at + 32, raw + 2);
  const uint8_t* packed = raw + 4;
  for (int g = 0; g < 8; g++) {
    uint8_t scale;
    uint8_t minimum;
    if (g < 4) {
      scale = packed[g] & 63;
      minimum = packed[g + 4] & 63;
    } else {
      scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4;
      minimum = (packed[g + 4] >> 4) | (packed[g] >> 6) << 4;
    }
    out.byte(at + 64 + g * STRIP, scale);
    out.byte(at + 192 + g * STRIP, minimum);
  }
}

void pack_q4_k(const Lane& out, const uint8_t* raw, int supers) {
  for (int s = 0; s < supers; s++, raw += 144) {
    const size_t at = static_cast<size_t>(s) * Q4_K_SUPER_BYTES;
    pack_k_header(out, at, raw);
    out.words(at + K_HEADER_BYTES, raw + 16, 32);
  }
}

void pack_q5_k(const Lane& out, const uint8_t* raw, int supers) {
  for (int s = 0; s < supers; s++, raw += 176) {
    const size_t at = static_cast<size_t>(s) * Q5_K_SUPER_BYTES;
    pack_k_header(out, at, raw);
    out.words(at + K_HEADER_BYTES, raw + 16, 40);  // the fifth bits, then the nibbles
  }
}

void pack_q6_k(const Lane& out, const uint8_t* raw, int supers) {
  for (int s = 0; s < supers; s++, raw += 210) {
    const size_t at = static_cast<size_t>(s) * Q6_K_SUPER_BYTES;
    out.half(at, raw + 208);
    for (int g = 0; g < 16; g++) {
      out.byte(at + 64 + g * STRIP, raw[192 + g]);
    }
    for (int h = 0; h < 2; h++) {
      const size_t half = at + K_HEADER_BYTES + h * Q6_K_HALF_BYTES;
      out.words(half, raw + h * 64, 16);
      out.words(half + 1024, raw + 128 + h * 32, 8);
    }
  }
}

}  // namespace

void pack_strip(Format format, const uint8_t* raw, int rows, int inputs, uint8_t* strip) {
  const size_t row_bytes = raw_row_bytes(format, inputs);
  const int groups = padded_inputs(inputs) / GROUP;
  for (int lane = 0; lane < rows; lane++, raw += row_bytes) {
    const Lane out{strip, lane};
    switch (format) {
      case Format::F32:
      case Format::BF16:
        pack_words(out, raw, row_bytes);
        break;
      case Format::F16:
        pack_halves(out, raw, inputs);
        break;
      case Format::Q8_0:
        pack_q8_0(out, raw, groups);
        break;
      case Format::Q4_0:
        pack_q4_0(out, raw, groups);
        break;
      case Format::Q4_1:
      case Format::Q4_Z:
        pack_q4_1(out, raw, groups);
        break;
      case Format::F8:
        pack_f8(out, raw, groups);
        break;
      case Format::Q4_K:
        pack_q4_k(out, raw, groups / 8);
        break;
      case Format::Q5_K:
        pack_q5_k(out, raw, groups / 8);
        break;
      case Format::Q6_K:
        pack_q6_k(out, raw, groups / 8);
        break;
    }
  }
}

namespace {

void unpack_floats(Format format, const Lane& in, int inputs, float* out) {
  for (int k = 0; k < padded_inputs(inputs); k++) {
    if (format == Format::F16) {
      out[k] = in.half(static_cast<size_t>(k) * STRIP * 2);
      continue;
    }
    uint32_t bits = in.word(static_cast<size_t>(format == Format::F32 ? k : k / 2) * LINE);
    if (format == Format::BF16) {
      bits = k % 2 == 0 ? bits << 16 : bits & 0xffff0000u;
    }
    std::memcpy(out + k, &bits, 4);
  }
}

void unpack_q8_0(const Lane& in, int groups, float* out) {
  for (int g = 0; g < groups; g++, out += GROUP) {
    const float d = in.half(static_cast<size_t>(g) * STRIP * 2);
    const size_t at = scales_bytes(groups) + static_cast<size_t>(g) * 512;
    for (int i = 0; i < GROUP; i++) {
      out[i] = static_cast<float>(in.byte_of(at, i) - 128) * d;
    }
  }
}

// Nibble i of a group of Q4_0 and Q4_1.
int nibble(const Lane& in, size_t at, int i) {
  const uint8_t byte = in.byte_of(at, i % 16);
  return i < 16 ? byte & 15 : byte >> 4;
}

void unpack_q4_0(const Lane& in, int groups, float* out) {
  for (int g = 0; g < groups; g++, out += GROUP) {
    const float d = in.half(static_cast<size_t>(g) * STRIP * 2);
    const size_t at = scales_bytes(groups) + static_cast<size_t>(g) * 256;
    for (int i = 0; i < GROUP; i++) {
      out[i] = static_cast<float>(nibble(in, at, i) - 8) * d;
    }
  }
}

void unpack_q4_1(const Lane& in, bool addend, int groups, float* out) {
  for (int g = 0; g < groups; g++, out += GROUP) {
    const size_t at = static_cast<size_t>(g) * Q4_1_GROUP_BYTES;
    const float d = in.half(at + 256);
    const float m = in.half(at + 288) * (addend ? d : 1.0f);
    for (int i = 0; i < GROUP; i++) {
      out[i] = static_cast<float>(nibble(in, at, i)) * d + m;
    }
  }
}

void unpack_f8(const Lane& in, int groups, float* out) {
  for (int g = 0; g < groups; g++, out += GROUP) {
    const size_t at = static_cast<size_t>(g) * F8_GROUP_BYTES;
    const uint32_t bits = in.word(at);
    float scale;
    std::memcpy(&scale, &bits, 4);
    for (int i = 0; i < GROUP; i++) {
      out[i] = e4m3_to_float(in.byte(at + LINE + static_cast<size_t>(i) * STRIP)) * scale;
    }
  }
}

void unpack_k(Format format, const Lane& in, int supers, float* out) {
  const bool five = format == Format::Q5_K;
  for (int s = 0; s < supers; s++) {
    const size_t at = static_cast<size_t>(s) * (five ? Q5_K_SUPER_BYTES : Q4_K_SUPER_BYTES);
    const size_t fifths = at + K_HEADER_BYTES;
    const size_t nibbles = fifths + (five ? 512 : 0);
    for (int g = 0; g < 8; g++, out += GROUP) {
      const float scale = static_cast<float>(in.byte(at + 64 + g * STRIP)) * in.half(at);
      const float minimum = static_cast<float>(in.byte(at + 192 + g * STRIP)) * in.half(at + 32);
      for (int i = 0; i < GROUP; i++) {
        const uint8_t byte = in.byte_of(nibbles + g / 2 * 512, i);
        const int fifth = five ? (in.byte_of(fifths, i) >> g & 1) << 4 : 0;
        out[i] = static_cast<float>((g % 2 == 0 ? byte & 15 : byte >> 4) | fifth) * scale - minimum;
      }
    }
  }
}

void unpack_q6_k(const Lane& in, int supers, float* out) {
  for (int s = 0; s < supers; s++) {
    const size_t at = static_cast<size_t>(s) * Q6_K_SUPER_BYTES;
    for (int g = 0; g < 8; g++, out += GROUP) {
      const size_t half = at + K_HEADER_BYTES + g / 4 * Q6_K_HALF_BYTES;
      for (int i = 0; i < GROUP; i++) {
        const uint8_t byte = in.byte_of(half, g % 2 * GROUP + i);
        const int low = g % 4 < 2 ? byte & 15 : byte >> 4;
        const int high = in.byte_of(half + 1024, i) >> (g % 4 * 2) & 3;
        const int8_t scale = static_cast<int8_t>(in.byte(at + 64 + (2 * g + i / 16) * STRIP));
        out[i] = static_cast<float>((low | high << 4) - 32) * (static_cast<float>(scale) * in.half(at));
      }
    }
  }
}

}  // namespace

void unpack_row(Format format, const uint8_t* strip, int lane, int inputs, float* out) {
  const Lane in{const_cast<uint8_t*>(strip), lane};
  const int groups = padded_inputs(inputs) / GROUP;
  switch (format) {
    case Format::F32:
    case Format::F16:
    case Format::BF16:
      return unpack_floats(format, in, inputs, out);
    case Format::Q8_0:
      return unpack_q8_0(in, groups, out);
    case Format::Q4_0:
      return unpack_q4_0(in, groups, out);
    case Format::Q4_1:
    case Format::Q4_Z:
      return unpack_q4_1(in, format == Format::Q4_Z, groups, out);
    case Format::F8:
      return unpack_f8(in, groups, out);
    case Format::Q4_K:
    case Format::Q5_K:
      return unpack_k(format, in, groups / 8, out);
    case Format::Q6_K:
      return unpack_q6_k(in, groups / 8, out);
  }
}

}  // namespace headrace::cpu
