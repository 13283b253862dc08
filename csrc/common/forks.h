// Tells a process from its forked children without a system call. Called by owners of threads and
// mappings before they use them.
#pragma once

#include <cstdint>

namespace smddp {

// The number of forks between this process and the first one that asked. vfork() and a bare clone()
// do not count: the child of neither may use this library.
uint32_t fork_count();

}  // namespace smddp
