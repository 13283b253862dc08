#include "common/unguessable.h"

#include <sys/random.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "common/forks.h"
#include "common/siphash.h"

namespace smddp {
namespace {

siphash::Key draw() {
  siphash::Key key;
  while (::getrandom(&key, sizeof key, 0) != static_cast<ssize_t>(sizeof key)) {
    if (errno != EINTR) std::abort();  // no kernel that this runs on lacks the call
  }
  return key;
}

}  // namespace

// A forked child has the same key and counter, but another number of forks.
uint64_t unguessable() {
  static const siphash::Key key = draw();
  static std::atomic<uint64_t> counter{0};
  uint64_t input[] = {counter.fetch_add(1, std::memory_order_relaxed), fork_count()};
  return siphash::hash(key, input, sizeof input);
}

}  // namespace smddp
