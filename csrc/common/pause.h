// What a loop that waits for another core's store does between two looks.
#pragma once

namespace smddp {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // yield is a no-op on most cores
#endif
}

}  // namespace smddp
