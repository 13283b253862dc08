#pragma once

namespace smddp {

// Runs `function(argument)` without the GIL, if this thread holds it: for waits for a thread that may
// free tensors, which takes the GIL. The module sets it.
extern void (*without_gil)(void (*function)(void*), void* argument);

}  // namespace smddp
