// Memory for intermediate sums, kept from one use to the next: fresh pages cost as much as the copy
// into them. Not thread-safe: its owner brings the lock.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "common/align.h"

namespace smddp {

class StagingPool;

struct ReturnToPool {
  StagingPool* pool = nullptr;
  size_t size = 0;
  inline void operator()(std::byte* data) const noexcept;
};

// Page-aligned memory that returns to its pool when it is destroyed. The pool must outlive it.
using Staging = std::unique_ptr<std::byte[], ReturnToPool>;

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
      return Staging(data, {this, size});
    }
    void* data = std::aligned_alloc(kPage, size);
    if (data == nullptr) throw std::bad_alloc();
    return Staging(static_cast<std::byte*>(data), {this, size});
  }

 private:
  friend struct ReturnToPool;
  // Not measured: it bounds what a process keeps.
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

inline void ReturnToPool::operator()(std::byte* data) const noexcept {
  pool->give_back(data, size);
}

}  // namespace smddp
