// Whether the next slot of an outbox is written past the caches.
//
// Where the readers' processors share no cache with the writer's, the lines of a slot that is written
// again have to be taken from the readers' caches first, and that takes several times as long as to
// write past all caches, after which the readers fetch from memory. Where a cache is shared, it is the
// other way round. How long the writes take tells which holds; it changes as the scheduler moves ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/clock.h"

namespace smddp::intranode {

class SlotWrites {
 public:
  // Smaller pieces go through the caches, and tell nothing.
  static constexpr size_t kLeast = 8 << 10;

  // `streamed_ns_per_byte`: of a bare write past the caches on this machine.
  explicit SlotWrites(double streamed_ns_per_byte) : limit_(kSlow * streamed_ns_per_byte) {}

  // Calls write(past the caches or not), which fills a slot with `bytes` bytes.
  template <class Write>
  void run(size_t bytes, Write&& write) {
    if (bytes < kLeast) return write(false);
    bool timed = is_timed();
    uint64_t begin = timed ? now_ns() : 0;
    write(streaming() && !timed);
    if (timed) took(bytes, now_ns() - begin);
  }

  bool streaming() const { return slow_ >= kAgree; }
  // Some writes are made through the caches in any case, and timed: many while that is the way,
  // where it costs a look at the clock, few while it is not.
  bool is_timed() { return writes_++ % (streaming() ? kRarely : kOften) == 0; }
  // A write of `bytes` bytes through the caches took `ns`. One that was interrupted does not decide.
  void took(size_t bytes, uint64_t ns) {
    bool slow = static_cast<double>(ns) > limit_ * static_cast<double>(bytes);
    slow_ = slow ? std::min(slow_ + 1, 2 * kAgree - 1) : std::max(slow_ - 1, 0);
  }

 private:
  static constexpr double kSlow = 5;
  static constexpr int kAgree = 3;
  static constexpr uint64_t kOften = 4, kRarely = 64;
  double limit_;
  int slow_ = 0;  // slow writes less fast ones, within bounds
  uint64_t writes_ = 0;
};

}  // namespace smddp::intranode
