// Monotonic time in nanoseconds. Read by every room that measures or waits.
#pragma once

#include <time.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace smddp {

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

// "1.5 s"
inline std::string seconds_text(uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(ns) * 1e-9);
  return text;
}

}  // namespace smddp
