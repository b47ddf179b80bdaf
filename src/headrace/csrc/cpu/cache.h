// The blocks of one layer's KV cache: where a position's page is, and writing to it.
#pragma once

#include <cstdint>

#include "kv_page.h"

namespace headrace::cpu {

struct CacheShape {
  CacheShape(CacheFormat format, int block_size, int num_kv_heads, int head_dim)
      : format(format),
        block_size(block_size),
        head_dim(head_dim),
        page_size(block_bytes(format, PAGE, 1, head_dim)),
        head_size(page_size * (block_size / PAGE)),
        block_bytes_all(head_size * num_kv_heads) {}

  size_t page_offset(int64_t block, int kv_head, int offset) const {
    return block * block_bytes_all + kv_head * head_size + offset / PAGE * page_size;
  }

  const CacheFormat format;
  const int block_size;
  const int head_dim;
  const size_t page_size;  // bytes
  const size_t head_size;  // of a head's pages in a block
  const size_t block_bytes_all;
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
