// On which core this process polls: the neighbours see it, and the thread that drives leaves a core on which one of
// them polls as well, when WaitPolicy allows it. Called by the engine, under its lock.
#pragma once

#include <cstdint>

#include "intranode/neighbors.h"
#include "intranode/presence.h"
#include "progress/wait_policy.h"

namespace smddp {

// Moves the calling thread to another one of the cores on which it may run. False: there is none. It may run on
// the same cores as before after that.
bool move_off(int core);

class OwnCore {
 public:
  void announce(intranode::Presence& presence);
  // After WaitPolicy::keeps_polling() has said false. True: the calling thread has moved.
  bool leave_if_shared(WaitPolicy& policy, intranode::Presence& presence,
                       const intranode::Neighbors& neighbors);
  uint64_t times_left() const { return times_left_; }

 private:
  uint64_t times_left_ = 0;
};

}  // namespace smddp
