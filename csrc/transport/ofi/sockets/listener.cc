#include "transport/ofi/sockets/listener.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "common/log.h"

namespace smddp::fabric {
namespace {

constexpr uint64_t kNoDescriptorNs = 20'000'000;

}  // namespace

Status Listener::open(SocketAddress at) {
  at.set_port(0);
  auto socket = listen_at(&at);
  if (!socket) return socket.status();
  socket_ = std::move(socket.value());
  port_ = at.port();
  return events_.add(socket_.get(), Source::kListener, 0, EPOLLIN);
}

FileDescriptor Listener::accept(uint64_t now) {
  for (;;) {
    FileDescriptor taken(::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (taken || errno == EAGAIN) return taken;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    // No file descriptor, or no memory: the listener would stay readable.
    if (std::has_single_bit(++refusals_)) {
      log(LogLevel::kWarning,
          std::string("fabric: can't take a connection for messages now: ") + std::strerror(errno));
    }
    (void)events_.change(socket_.get(), Source::kListener, 0, 0);
    no_descriptor_until_ns_ = now + kNoDescriptorNs;
    return {};
  }
}

void Listener::retry(uint64_t now) {
  if (now < no_descriptor_until_ns_) return;
  no_descriptor_until_ns_ = 0;
  (void)events_.change(socket_.get(), Source::kListener, 0, EPOLLIN);
}

}  // namespace smddp::fabric
