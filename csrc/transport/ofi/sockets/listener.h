// The port at which connections for messages come. Called by MessageSockets.
#pragma once

#include <cstdint>

#include "common/file_descriptor.h"
#include "common/status.h"
#include "common/tcp_sockets.h"
#include "transport/ofi/sockets/events.h"

namespace smddp::fabric {

class Listener {
 public:
  explicit Listener(Events& events) : events_(events) {}
  ~Listener() { events_.end(socket_); }

  // Listens at a port that the kernel chooses, at the IP address `at`.
  Status open(SocketAddress at);
  uint16_t port() const { return port_; }

  // A connection that has come; none if there is no further one, or no file descriptor for it.
  FileDescriptor accept(uint64_t now);
  // Whether connections wait for a file descriptor: the listener is not watched then, and retry() does so again
  // after a while.
  bool waits() const { return no_descriptor_until_ns_ != 0; }
  void retry(uint64_t now);

 private:
  Events& events_;
  FileDescriptor socket_;
  uint16_t port_ = 0;
  uint64_t no_descriptor_until_ns_ = 0;  // 0: the listener is watched
  uint64_t refusals_ = 0;
};

}  // namespace smddp::fabric
