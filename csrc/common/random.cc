#include "common/random.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/types.h>
#include <unistd.h>

#include "common/file_descriptor.h"

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

}  // namespace smddp
