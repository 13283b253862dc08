// Monotonic time in nanoseconds. Read by every room that measures or waits.
#pragma once

#include <time.h>

#include <cstdint>

namespace smddp {

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace smddp
