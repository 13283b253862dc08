#include "progress/wait_policy.h"

#include <utility>

#include "common/env.h"

namespace smddp {

// With 20 us, an AllGather of 16 KiB on 2 hosts of 4 ranks took up to a quarter longer than with 200; 1,000 us gained on
// 2 x 8 alone, where runs differ by half (benchmarks/results/2026-11-22-polls).
WaitPolicy WaitPolicy::from_env() {
  double microseconds = env::debug_number("spin_microseconds").value_or(200);
  return WaitPolicy(static_cast<uint64_t>(1000 * std::max(0.0, microseconds)));
}

void WaitPolicy::expect_local_ranks(int ranks, unsigned cores) {
  uint64_t shared_by = std::max(1u, cores);
  ranks_per_core_ =
      std::max(ranks_per_core_, (static_cast<uint64_t>(ranks) + shared_by - 1) / shared_by);
}

bool WaitPolicy::keeps_polling(uint64_t now, uint64_t spin_ns) {
  turn_began_ns_ = 0;
  if (idle_since_ns_ == 0) idle_since_ns_ = now;
  // Two ranks that yield to one another on one core stay there, however idle the next core is. A thread that
  // sleeps may be woken on an idle core, or on that of the rank that wakes it. Between hosts a sleep costs more
  // than it may bring.
  crowded_ = std::exchange(shares_core_, false) && ranks_per_core_ == 1 && !network_;
  return now - idle_since_ns_ < spin_ns && !crowded_;
}

bool WaitPolicy::may_leave_core(uint64_t now) {
  if (!std::exchange(crowded_, false) || now < may_leave_from_ns_) return false;
  may_leave_from_ns_ = now + kLeavingNs;
  return true;
}

}  // namespace smddp
