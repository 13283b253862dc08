// Numbers that another process can't guess, without a system call for each.
#pragma once

#include <cstdint>

namespace smddp {

// Differs from call to call. Thread-safe.
uint64_t unguessable();

}  // namespace smddp
