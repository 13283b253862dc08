// The GIL, for code that knows nothing of Python.
#pragma once

namespace smddp {

// Runs `function(argument)` without the GIL if this thread holds it. For waits for a thread that may free
// tensors, as freeing them takes the GIL. The module sets it.
extern void (*without_gil)(void (*function)(void*), void* argument);

}  // namespace smddp
