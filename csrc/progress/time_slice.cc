#include "progress/time_slice.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace smddp {
namespace {

constexpr uint64_t kShortestSliceNs = 100'000;

// Linux's sched_attr, version 0: glibc has neither the call nor, in older versions, the struct.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = SCHED_OTHER;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0;  // the slice, from Linux 6.12 on; ignored before
  uint64_t deadline = 0;
  uint64_t period = 0;
};

}  // namespace

void request_short_time_slices() {
  SchedulingAttributes now;
  if (syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) != 0) return;
  if (now.policy != SCHED_OTHER || now.nice != 0) return;
  SchedulingAttributes wanted;
  wanted.runtime = kShortestSliceNs;
  (void)syscall(SYS_sched_setattr, 0, &wanted, 0);
}

void request_exact_timers() { (void)prctl(PR_SET_TIMERSLACK, 1); }

}  // namespace smddp
