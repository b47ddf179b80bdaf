// The blocks of one layer's KV cache: where a position's page is, and writing to it.
#pragma once

#include <cstdint>

#include "kv_page.h"

namespace headrace::cpu {

struct CacheShape {
  CacheFormat format;
  int block_size;
  int num_kv_heads;
  int head_dim;
  size_t page_bytes() const {
    return static_cast<size_t>(block_bytes(format, PAGE, 1, head_dim));
  }
  size_t block_bytes_all() const {
    return static_cast<size_t>(block_bytes(format, block_size, num_kv_heads, head_dim));
  }
  size_t page_offset(int64_t block, int kv_head, int offset) const {
    const int pages = block_size / PAGE;
    return block * block_bytes_all() + (static_cast<size_t>(kv_head) * pages + offset / PAGE) * page_bytes();
  }
};

struct LayerCache {
  const CacheShape* shape;
  uint8_t* keys;
  uint8_t* values;

  // `slot`: block * block_size + offset.
  void write(int64_t slot, int kv_head, const float* key, const float* value) const {
    const int offset = static_cast<int>(slot % shape->block_size);
    const size_t page = shape->page_offset(slot / shape->block_size, kv_head, offset);
    switch (shape->format) {
      case CacheFormat::F32:
        return write_as<CacheFormat::F32>(page, offset % PAGE, key, value);
      case CacheFormat::BF16:
        return write_as<CacheFormat::BF16>(page, offset % PAGE, key, value);
      case CacheFormat::INT8:
        return write_as<CacheFormat::INT8>(page, offset % PAGE, key, value);
    }
  }

 private:
  template <CacheFormat F>
  void write_as(size_t page, int lane, const float* key, const float* value) const {
    Page<F>::write_key(keys + page, shape->head_dim, lane, key);
    Page<F>::write_value(values + page, shape->head_dim, lane, value);
  }
};

}  // namespace headrace::cpu
