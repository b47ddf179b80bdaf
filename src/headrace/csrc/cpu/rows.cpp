// Rounding rows to the kinds that the tiles multiply.
#include "rows.h"

#include <cmath>
#include <cstring>

#include "simd.h"

namespace headrace::cpu {

namespace {

// Below it a group is zero: the reciprocal of its scale would overflow.
constexpr float SMALLEST = 1e-30f;

int planes(Rounding rounding) {
  return rounding == Rounding::INT16 ? 2 : 1;
}

// From so many rows on a strip is multiplied so often that only the loads of the rows count: in panels of up to six rows each serves
// two strips.
constexpr int MANY_ROWS = 48;
constexpr int MOST_OF_MANY = 6;

// The panel size whose panels cost least: each costs its rows, and unpacking the weights costs about one row more.
int choose_panel_rows(int rows, unsigned kinds, Rounding rounding) {
  int best = 1;
  int best_cost = 0;
  for (const int size : PANEL_ROWS) {
    if (rows >= MANY_ROWS && size > MOST_OF_MANY) break;
    const int cost = (rows + size - 1) / size * (size + 1);
    if (best_cost == 0 || cost <= best_cost) {
      best = size;
      best_cost = cost;
    }
  }
  const bool amx = AMX_ROWS > 0 && kinds == ROWS_INT && rounding == Rounding::INT16;
  return amx && (rows + AMX_ROWS - 1) / AMX_ROWS * AMX_COST < best_cost ? AMX_ROWS : best;
}

// The largest magnitude of 32 values; NaN if there is one. As integers magnitudes have the same order, with NaN above all.
HEADRACE_INLINE float largest(const float* values) {
#if defined(__AVX512F__)
  const __m512i sizes = _mm512_set1_epi32(0x7fffffff);
  const __m512i low = _mm512_and_si512(_mm512_loadu_si512(values), sizes);
  const __m512i high = _mm512_and_si512(_mm512_loadu_si512(values + 16), sizes);
  const int bits = _mm512_reduce_max_epi32(_mm512_max_epi32(low, high));
#else
  int bits = 0;
  for (int i = 0; i < GROUP; i++) {
    int magnitude;
    std::memcpy(&magnitude, values + i, 4);
    bits = std::max(bits, magnitude & 0x7fffffff);
  }
#endif
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// The low bytes of 32 integers, as eight words that are `stride` bytes apart.
HEADRACE_INLINE void scatter_words(int8_t* out, size_t stride, IntVec low, IntVec high) {
  if (stride == 4) {  // one row
    store_int8(out, low);
    store_int8(out + 16, high);
    return;
  }
  alignas(LINE) int8_t words[GROUP];
  store_int8(words, low);
  store_int8(words + 16, high);
  HEADRACE_UNROLL for (int i = 0; i < 8; i++) {
    std::memcpy(out + i * stride, words + i * 4, 4);
  }
}

struct Quantized {
  IntVec low, high;
  float scale;
};

HEADRACE_INLINE Quantized quantize(const float* values, float top) {
  const float size = largest(values);
  const bool usable = size > SMALLEST && size < INFINITY;
  const Vec inverse = set1(usable ? top / size : 0.0f);
  Quantized q;
  q.scale = size <= SMALLEST ? 0.0f : size / top;  // infinite or NaN inputs make infinite or NaN outputs
  q.low = usable ? to_int(mul(load(values), inverse)) : set1_int(0);
  q.high = usable ? to_int(mul(load(values + 16), inverse)) : set1_int(0);
  return q;
}

// Of four inputs the even two, then the odd two, as int16; the fours `stride` bytes apart.
HEADRACE_INLINE void scatter_pairs(int8_t* out, size_t stride, const Quantized& q) {
  alignas(LINE) int64_t fours[8];
#if defined(__AVX512F__)
  const auto pairs = [](__m512i x) {  // in the low half of each four
    return _mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(_mm512_shuffle_epi32(x, _MM_PERM_DDDC), 16));
  };
  const __m512i places = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
  _mm512_store_si512(fours, _mm512_permutex2var_epi64(pairs(q.low), places, pairs(q.high)));
#else
  alignas(LINE) int32_t ints[GROUP];
  std::memcpy(ints, &q.low, sizeof(q.low));
  std::memcpy(ints + 16, &q.high, sizeof(q.high));
  for (int i = 0; i < 8; i++) {
    const int32_t* four = ints + 4 * i;
    const int32_t words[2] = {(four[0] & 0xffff) | four[2] << 16, (four[1] & 0xffff) | four[3] << 16};
    std::memcpy(fours + i, words, 8);
  }
#endif
  if (stride == 8) {  // one row
    std::memcpy(out, fours, sizeof(fours));
    return;
  }
  HEADRACE_UNROLL for (int i = 0; i < 8; i++) {
    std::memcpy(out + i * stride, fours + i, 8);
  }
}

HEADRACE_INLINE IntVec high_byte(IntVec x) {
  return shift_right<8>(add(x, set1_int(128)));
}

}  // namespace

Rows::Rows(void* memory, int rows, int inputs, unsigned kinds, Rounding rounding)
    : memory_(static_cast<uint8_t*>(memory)), rows_(rows), inputs_(inputs), kinds_(kinds), rounding_(rounding) {
  const size_t padded = padded_inputs(inputs);
  groups_ = static_cast<int>(padded / GROUP);
  panel_rows_ = choose_panel_rows(rows, kinds, rounding);
  panels_ = (rows + panel_rows_ - 1) / panel_rows_;
  const size_t elements = padded * panel_rows_;
  const size_t groups = static_cast<size_t>(groups_) * panel_rows_;
  bf16_at_ = kinds & ROWS_F32 ? to_multiple(elements * 4, LINE) : 0;
  ints_at_ = bf16_at_ + (kinds & ROWS_BF16 ? to_multiple(elements * 2, LINE) : 0);
  scale_at_ = ints_at_ + (kinds & ROWS_INT ? to_multiple(elements * planes(rounding), LINE) : 0);
  panel_bytes_ = scale_at_ + (kinds & ROWS_INT ? to_multiple(groups * 20, LINE) : 0);
}

size_t Rows::bytes(int rows, int inputs, unsigned kinds, Rounding rounding) {
  size_t most = 0;
  for (const int size : PANEL_ROWS) {
    Rows panel(nullptr, size, inputs, kinds, rounding);
    most = std::max(most, panel.panel_bytes_ / panel.panel_rows_ + LINE * 4);
  }
  return most * (rows + MAX_PANEL_ROWS);
}

Panel Rows::panel(int index) const {
  const uint8_t* at = memory_ + index * panel_bytes_;
  const size_t groups = static_cast<size_t>(groups_) * panel_rows_;
  const float* scale = reinterpret_cast<const float*>(at + scale_at_);
  Panel panel;
  panel.rows = panel_rows_;
  panel.groups = groups_;
  panel.f32 = reinterpret_cast<const float*>(at);
  panel.bf16 = reinterpret_cast<const uint32_t*>(at + bf16_at_);
  panel.ints = reinterpret_cast<const int8_t*>(at + ints_at_);
  panel.scale = scale;
  panel.scaled_sum = scale + groups;
  panel.offset = reinterpret_cast<const int32_t*>(scale + 2 * groups);
  panel.half_offset = panel.offset + groups;
  return panel;
}

void Rows::put(int row, int begin, int end, const float* values) {
  uint8_t* at = memory_ + row / panel_rows_ * panel_bytes_;
  const int lane = row % panel_rows_;
  const int first = begin / GROUP;
  const int whole = (end - begin) / GROUP;
  put_groups(at, lane, first, whole, values);
  const int rest = end - begin - whole * GROUP;
  if (rest == 0) return;
  float filled[GROUP] = {};
  std::memcpy(filled, values + whole * GROUP, rest * sizeof(float));
  put_groups(at, lane, first + whole, 1, filled);
}

void Rows::put_groups(uint8_t* panel, int lane, int group, int count, const float* values) const {
  if (kinds_ & ROWS_INT) put_ints(panel, lane, group, count, values);
  if (!(kinds_ & (ROWS_F32 | ROWS_BF16))) return;
  for (int i = 0; i < count; i++) {
    if (kinds_ & ROWS_F32) put_f32(panel, lane, group + i, values + i * GROUP);
    if (kinds_ & ROWS_BF16) put_bf16(panel, lane, group + i, values + i * GROUP);
  }
}

void Rows::put_f32(uint8_t* panel, int lane, int group, const float* values) const {
  float* out = reinterpret_cast<float*>(panel) + static_cast<size_t>(group) * GROUP * panel_rows_ + lane;
  if (panel_rows_ == 1) {
    std::memcpy(out, values, GROUP * sizeof(float));
    return;
  }
  HEADRACE_UNROLL for (int i = 0; i < GROUP; i++) {
    out[static_cast<size_t>(i) * panel_rows_] = values[i];
  }
}

void Rows::put_bf16(uint8_t* panel, int lane, int group, const float* values) const {
  uint32_t* out = reinterpret_cast<uint32_t*>(panel + bf16_at_) + static_cast<size_t>(group) * 16 * panel_rows_ + lane;
  alignas(LINE) uint32_t pairs[16];
#if defined(__AVX512BF16__)
  _mm512_store_si512(pairs, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(values + 16), _mm512_loadu_ps(values)));
#else
  for (int i = 0; i < 16; i++) {
    pairs[i] = float_to_bf16(values[2 * i]) | static_cast<uint32_t>(float_to_bf16(values[2 * i + 1])) << 16;
  }
#endif
  HEADRACE_UNROLL for (int i = 0; i < 16; i++) {
    out[static_cast<size_t>(i) * panel_rows_] = pairs[i];
  }
}

void Rows::put_ints(uint8_t* panel, int lane, int group, int count, const float* values) const {
  const bool amx = panel_rows_ == AMX_ROWS;
  const size_t word = amx ? 4 : static_cast<size_t>(panel_rows_) * 4;  // from four inputs to the next four
  const size_t group_bytes = static_cast<size_t>(GROUP) * panel_rows_;
  const size_t plane = groups_ * group_bytes;
  const size_t groups = static_cast<size_t>(groups_) * panel_rows_;
  const size_t step = panel_rows_;
  const bool two = rounding_ == Rounding::INT16;
  const size_t first_byte = group * group_bytes + lane * (amx ? GROUP : 4);
  int8_t* out = reinterpret_cast<int8_t*>(panel + ints_at_) + first_byte;
  int8_t* pairs = reinterpret_cast<int8_t*>(panel + ints_at_) + 2 * first_byte;
  float* scale = reinterpret_cast<float*>(panel + scale_at_) + group * step + lane;
  int32_t* offset = reinterpret_cast<int32_t*>(scale + 2 * groups);
  int32_t* half_offset = reinterpret_cast<int32_t*>(panel + scale_at_) + 3 * groups + group * 2 * step + lane;
  for (int i = 0; i < count; i++, values += GROUP) {
    const Quantized q = quantize(values, two ? 32512.0f : 127.0f);
    if (!two) {
      scatter_words(out, word, q.low, q.high);
    } else if (INT16_PAIRS && !amx) {
      scatter_pairs(pairs, 2 * word, q);
    } else {
      const IntVec low = high_byte(q.low);
      const IntVec high = high_byte(q.high);
      scatter_words(out, word, low, high);
      scatter_words(out + plane, word, sub(q.low, shift_left<8>(low)), sub(q.high, shift_left<8>(high)));
    }
    const int first = reduce_add(q.low);
    const int second = reduce_add(q.high);
    scale[0] = q.scale;
    scale[groups] = q.scale * static_cast<float>(first + second);
    offset[0] = -128 * (first + second);
    half_offset[0] = -128 * first;
    half_offset[step] = -128 * second;
    out += group_bytes;
    pairs += 2 * group_bytes;
    scale += step;
    offset += step;
    half_offset += 2 * step;
  }
}

}  // namespace headrace::cpu
