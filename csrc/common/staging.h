// Memory for intermediate sums, kept from one use to the next: fresh pages cost as much as the copy
// into them. Not thread-safe: its owner brings the lock.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "common/align.h"

namespace smddp {

class StagingPool;

// Page-aligned memory that returns to its pool when it is destroyed. The pool must outlive it.
class Staging {
 public:
  Staging() = default;
  Staging(StagingPool* pool, std::byte* data, size_t size)
      : pool_(pool), data_(data), size_(size) {}
  Staging(Staging&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  Staging& operator=(Staging&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  inline ~Staging();
  std::byte* data() const { return data_; }

 private:
  StagingPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

class StagingPool {
 public:
  StagingPool() = default;
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool() {
    for (auto& [size, data] : idle_) std::free(data);
  }

  Staging take(size_t bytes) {
    size_t size = std::bit_ceil(std::max(bytes, kPage));
    for (auto& run : idle_) {
      if (run.first != size) continue;
      std::byte* data = run.second;
      run = idle_.back();
      idle_.pop_back();
      idle_bytes_ -= size;
      return {this, data, size};
    }
    void* data = std::aligned_alloc(kPage, size);
    if (data == nullptr) throw std::bad_alloc();
    return {this, static_cast<std::byte*>(data), size};
  }

 private:
  friend class Staging;
  static constexpr size_t kIdleBytes = 64 << 20;

  void give_back(std::byte* data, size_t size) noexcept {
    if (idle_bytes_ + size > kIdleBytes) return std::free(data);
    try {
      idle_.emplace_back(size, data);
      idle_bytes_ += size;
    } catch (const std::bad_alloc&) {
      std::free(data);
    }
  }

  std::vector<std::pair<size_t, std::byte*>> idle_;
  size_t idle_bytes_ = 0;
};

inline Staging::~Staging() {
  if (pool_ != nullptr) pool_->give_back(data_, size_);
}

}  // namespace smddp
