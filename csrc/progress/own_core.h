// Leaves a core on which another process polls as well. Called by the engine.
#pragma once

namespace smddp {

// Moves the calling thread to another one of the cores on which it may run. False: there is none. It may run on
// the same cores as before after that.
bool move_off(int core);

}  // namespace smddp
