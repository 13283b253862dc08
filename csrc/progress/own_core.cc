#include "progress/own_core.h"

#include <sched.h>

#include <cstddef>

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

}  // namespace smddp
