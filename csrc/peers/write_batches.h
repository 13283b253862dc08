// Which of the writes of a send flow are in the target's memory, where writes complete in any order: the
// writes are counted in two batches, and the older one is over before the newer one. Must not know what is
// written. SendFlow has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smddp {

class WriteBatches {
 public:
  WriteBatches() = default;
  WriteBatches(const WriteBatches&) = delete;
  WriteBatches& operator=(const WriteBatches&) = delete;

  // The counter that the next write increments when it starts and decrements when it completes.
  uint32_t* pending() { return &pending_[newer_]; }
  uint32_t count() const { return pending_[0] + pending_[1]; }
  bool idle() const { return count() == 0; }
  // Of the flow's first `sent` bytes, whose writes have started, how many are complete at least.
  size_t completed(size_t sent) {
    for (int turn = 0; turn < 2 && pending_[1 - newer_] == 0; ++turn) {
      completed_ = newer_from_;
      newer_from_ = sent;
      newer_ = 1 - newer_;
    }
    return completed_;
  }

 private:
  uint32_t pending_[2] = {0, 0};
  int newer_ = 0;
  size_t newer_from_ = 0;  // bytes sent before the first write of the newer batch
  size_t completed_ = 0;
};

}  // namespace smddp
