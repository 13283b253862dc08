// Which of the writes of a send flow are in the target's memory, where writes complete in any order: the
// writes are counted in batches, and what was sent before the oldest batch that is not complete has arrived. A batch
// is a single write as long as few are under way. Must not know what is written. SendFlow has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>

namespace smddp {

class WriteBatches {
 public:
  WriteBatches() = default;
  WriteBatches(const WriteBatches&) = delete;
  WriteBatches& operator=(const WriteBatches&) = delete;

  // The counter that the next write increments when it starts and decrements when it completes.
  uint32_t* pending() { return &pending_[newest_]; }
  uint32_t count() const { return std::accumulate(pending_.begin(), pending_.end(), 0u); }
  bool idle() const { return count() == 0; }
  // Of the flow's first `sent` bytes, whose writes have started, how many are complete at least. The next write
  // begins a batch, if one is free.
  size_t completed(size_t sent) {
    while (oldest_ != newest_ && pending_[oldest_] == 0) oldest_ = after(oldest_);
    if (pending_[newest_] > 0 && after(newest_) != oldest_) newest_ = after(newest_);
    if (pending_[newest_] == 0) from_[newest_] = sent;
    return from_[oldest_];
  }

 private:
  static constexpr size_t kBatches = 16;
  static size_t after(size_t batch) { return (batch + 1) % kBatches; }

  std::array<uint32_t, kBatches> pending_{};
  std::array<size_t, kBatches> from_{};  // bytes sent before the first write of a batch
  size_t oldest_ = 0, newest_ = 0;       // in the ring
};

}  // namespace smddp
