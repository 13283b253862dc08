// Decides whether the next slot of an outbox is written past the caches. Knows only how long writes took;
// Outbox calls it.
//
// If the readers' processors share no cache with the writer's processor, a write through the caches has
// to take the lines of a used slot from the readers' caches first. That takes several times as long as a
// write past all caches, after which the readers fetch from memory. If the processors share a cache, a
// write through the caches is the faster one. The duration of the writes tells which case holds. The case
// changes when the scheduler moves ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/clock.h"

namespace smddp::intranode {

class SlotWrites {
 public:
  // Smaller pieces are written through the caches, and their duration is not used. 4 and 16 KiB take as
  // long (2026-11-29-constants, AMD EPYC).
  static constexpr size_t kLeast = 8 << 10;

  // `streamed_ns_per_byte`: the cost of a write past the caches on this machine.
  explicit SlotWrites(double streamed_ns_per_byte) : limit_(kSlow * streamed_ns_per_byte) {}

  // Calls write(streaming), which fills a slot with `bytes` bytes, past the caches if `streaming`.
  template <class Write>
  void run(size_t bytes, Write&& write) {
    if (bytes < kLeast) return write(false);
    bool timed = is_timed();
    uint64_t begin = timed ? now_ns() : 0;
    write(streaming() && !timed);
    if (timed) took(bytes, now_ns() - begin);
  }

  bool streaming() const { return slow_ >= kAgree; }
  // Some writes are always made through the caches and timed. Many (1 of kOften) while all writes are
  // made that way, as a timed write then costs only a look at the clock; few (1 of kRarely) otherwise.
  bool is_timed() { return writes_++ % (streaming() ? kRarely : kOften) == 0; }
  // Records that a write of `bytes` bytes through the caches took `ns`. A single slow write, such as an
  // interrupted one, does not change the decision.
  void took(size_t bytes, uint64_t ns) {
    bool slow = static_cast<double>(ns) > limit_ * static_cast<double>(bytes);
    slow_ = slow ? std::min(slow_ + 1, 2 * kAgree - 1) : std::max(slow_ - 1, 0);
  }

 private:
  // A slot whose lines are in another core's cache takes 12 to 17 times as long as past the caches (2026-11-21, AMD EPYC);
  // one of 64 adds a quarter to the time of all then. Not measured: the others.
  static constexpr double kSlow = 5;
  static constexpr int kAgree = 3;
  static constexpr uint64_t kOften = 4, kRarely = 64;
  double limit_;
  int slow_ = 0;  // number of slow writes minus fast writes, within bounds
  uint64_t writes_ = 0;
};

}  // namespace smddp::intranode
