// Tells a process from its forked children without a system call.
#pragma once

#include <cstdint>

namespace smddp {

// How many forks lie between this process and the first that asked. vfork() and a bare clone() do not
// count: neither may go on to use this library.
uint32_t fork_count();

}  // namespace smddp
