// Zeroed memory for weights and buffers, in huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace headrace::cpu {

// Says how much was refused; Python's MemoryError has its words.
class MemoryRefused : public std::bad_alloc {
 public:
  explicit MemoryRefused(size_t size) : message_("the system refuses " + std::to_string(size) + " bytes of memory") {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// Owns `size` bytes, aligned to a cache line at least. Pages that nobody writes take no memory.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t size) : size_(size) {
    if (size == 0) {
      return;
    }
#if defined(__linux__)
    reserve(size < HUGE_PAGE ? SMALL_PAGE : HUGE_PAGE);
#else
    base_ = std::aligned_alloc(SMALL_PAGE, (size + SMALL_PAGE - 1) / SMALL_PAGE * SMALL_PAGE);
    if (base_ == nullptr) {
      throw MemoryRefused(size_);
    }
    std::memset(base_, 0, size);
    data_ = static_cast<uint8_t*>(base_);
#endif
  }
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory() {
    if (base_ != nullptr) {
#if defined(__linux__)
      munmap(base_, mapped_);
#else
      std::free(base_);
#endif
    }
  }

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  static constexpr size_t SMALL_PAGE = 4096;
  static constexpr size_t HUGE_PAGE = 2 << 20;

#if defined(__linux__)
  void reserve(size_t page) {
    const size_t usable = (size_ + page - 1) / page * page;
    mapped_ = usable + (page == HUGE_PAGE ? page : 0);  // room to align
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
      base_ = nullptr;
      throw MemoryRefused(size_);
    }
    const uintptr_t start = reinterpret_cast<uintptr_t>(base_);
    data_ = reinterpret_cast<uint8_t*>((start + page - 1) / page * page);
    if (page == HUGE_PAGE) {
      madvise(data_, usable, MADV_HUGEPAGE);
    }
  }
#endif

  void swap(Memory& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
  }

  void* base_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;
};

// Gives out pieces of large Memories, so that small matrices lie in huge pages too. Pieces live as long as the arena.
class Arena {
 public:
  uint8_t* take(size_t size) {
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (chunks_.empty() || chunks_.back().size() - used_ < size) {
      chunks_.emplace_back(size < CHUNK ? CHUNK : size);
      used_ = 0;
    }
    uint8_t* piece = chunks_.back().data() + used_;
    used_ += size;
    return piece;
  }

 private:
  static constexpr size_t ALIGNMENT = 4096;
  static constexpr size_t CHUNK = 32 << 20;

  std::vector<Memory> chunks_;
  size_t used_ = 0;  // of the last chunk
};

}  // namespace headrace::cpu
