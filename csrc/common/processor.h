// Hints to the processor that no standard header has.
#pragma once

#include <cstddef>

namespace smddp {

// What a loop that waits for another core's store does between two looks.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // yield is a no-op on most cores
#endif
}

inline constexpr size_t kCacheLine = 64;

// Starts to bring lines here, to read them.
inline void prefetch(const std::byte* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(from + at, 0);
}

}  // namespace smddp
