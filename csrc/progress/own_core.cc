#include "progress/own_core.h"

#include <sched.h>

#include "common/clock.h"

namespace smddp {

bool move_off(int core) {
  cpu_set_t allowed, others;
  if (core < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  others = allowed;
  CPU_CLR(static_cast<size_t>(core), &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return false;
  (void)sched_setaffinity(0, sizeof allowed, &allowed);
  return true;
}

void OwnCore::announce(intranode::Presence& presence) { presence.announce_core(sched_getcpu()); }

bool OwnCore::leave_if_shared(WaitPolicy& policy, intranode::Presence& presence,
                              const intranode::Neighbors& neighbors) {
  if (!policy.may_leave_core(now_ns())) return false;
  int core = sched_getcpu();
  if (!neighbors.any_polls_on(core) || !move_off(core)) return false;
  announce(presence);
  ++times_left_;
  return true;
}

}  // namespace smddp
