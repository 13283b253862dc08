// The TCP connections of this process.
#pragma once

#include <sys/socket.h>

namespace smddp {

template <class F>
void for_each_connection(F&& f) {
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_storage at{};
    socklen_t size = sizeof at;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&at), &size) == 0 && at.ss_family != AF_UNIX)
      f(fd);
  }
}

// As a firewall does: what the kernel still has to send is lost.
inline void reset_connections() {
  for_each_connection([](int fd) {
    sockaddr nowhere = {.sa_family = AF_UNSPEC, .sa_data = {}};
    connect(fd, &nowhere, sizeof nowhere);
  });
}

}  // namespace smddp
