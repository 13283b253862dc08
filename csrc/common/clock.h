// Monotonic time in nanoseconds. Read by every folder that measures or waits.
#pragma once

#include <time.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace smddp {

// The time of a simulation, which now_ns() then reads: from before its first engine is made until after its last, and
// never in a process that has groups of its own.
inline const uint64_t* simulated_clock = nullptr;

inline uint64_t clock_ns(clockid_t clock) {
  if (simulated_clock != nullptr) [[unlikely]]
    return *simulated_clock;
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}
inline uint64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

// The same clock, up to a tick of the kernel (10 ms) behind, at a quarter of the price: for times that people
// read.
inline uint64_t recent_ns() { return clock_ns(CLOCK_MONOTONIC_COARSE); }

inline double in_seconds(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

// "1.5 s"
inline std::string seconds_text(uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", in_seconds(ns / 1'000'000 * 1'000'000));
  return text;
}

}  // namespace smddp
