#include "common/forks.h"

#include <pthread.h>

#include <atomic>

namespace smddp {
namespace {

// Written only by the one thread of a child, before fork() returns there.
std::atomic<uint32_t> forks{0};

}  // namespace

uint32_t fork_count() {
  [[maybe_unused]] static const int counted =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  return forks.load(std::memory_order_relaxed);
}

}  // namespace smddp
