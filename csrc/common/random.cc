#include "common/random.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>

#include "common/file_descriptor.h"
#include "common/forks.h"
#include "common/siphash.h"

namespace smddp {
namespace {

template <class Read>
bool fill(std::byte* to, size_t bytes, Read&& read) {
  while (bytes > 0) {
    ssize_t got = read(to, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

// Kernels before 3.17, and some sandboxes, have no getrandom().
bool fill_random(void* to, size_t bytes) noexcept {
  auto* at = static_cast<std::byte*>(to);
  if (fill(at, bytes, [](void* p, size_t n) { return ::getrandom(p, n, 0); })) return true;
  FileDescriptor device(::open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  return device && fill(at, bytes, [&](void* p, size_t n) { return ::read(device.get(), p, n); });
}

// A forked child has the same key and counter, but another number of forks.
bool draw_number(uint64_t* number) noexcept {
  static siphash::Key key;
  static const bool drawn = fill_random(&key, sizeof key);
  static std::atomic<uint64_t> counter{0};
  uint64_t input[] = {counter.fetch_add(1, std::memory_order_relaxed), fork_count()};
  *number = siphash::hash(key, input, sizeof input);
  return drawn;
}

}  // namespace smddp
