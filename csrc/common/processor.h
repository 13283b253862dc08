// Hints to the processor that no standard header has. Called by loops that wait and by copies.
#pragma once

#include <cstddef>

namespace smddp {

// A loop that waits for another core's store calls it between two looks.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // yield is a no-op on most cores
#endif
}

inline constexpr size_t kCacheLine = 64;

// Starts to load the cache lines of a range that is about to be read.
inline void prefetch(const std::byte* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(from + at, 0);
}

}  // namespace smddp
