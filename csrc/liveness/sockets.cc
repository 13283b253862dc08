#include "liveness/sockets.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>

#include "common/env.h"
#include "common/interfaces.h"
#include "common/tcp_sockets.h"

namespace smddp::liveness {
namespace {

// Of the first interface that is up, no loopback and not left out by the user, bridges of containers last.
std::string own_ip() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return "127.0.0.1";
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  std::string of_bridge, chosen = env::get("FABRIC_INTERFACE");
  for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
    bool up = (at->ifa_flags & IFF_UP) != 0 && (at->ifa_flags & IFF_LOOPBACK) == 0;
    if (!up || at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET) continue;
    char text[INET_ADDRSTRLEN] = {};
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr, text,
                sizeof text);
    std::string name = at->ifa_name;
    if (leaves_out(chosen, name) || leaves_out(chosen, text)) continue;
    if (!is_host_bridge(name)) return text;
    of_bridge = text;
  }
  return of_bridge.empty() ? "127.0.0.1" : of_bridge;
}

}  // namespace

Result<FileDescriptor> listen_at(const std::string& ip, Contact* contact) {
  auto address = SocketAddress::parse(ip.empty() ? own_ip() : ip, 0);
  if (!address) return address.status();
  auto socket = smddp::listen_at(&address.value());
  if (!socket) {
    return Status(socket.status().code(),
                  "no port for questions whether this process lives: " + socket.status().message());
  }
  contact->set_address(address.value());
  return socket;
}

int begin_connect(const Contact& to, FileDescriptor* socket) {
  if (int error = smddp::begin_connect(to.address(), socket); error != 0) return error;
  linger at_close = {1, 0};
  ::setsockopt(socket->get(), SOL_SOCKET, SO_LINGER, &at_close, sizeof at_close);
  return 0;
}

Moved read_some(const FileDescriptor& socket, void* data, size_t size, size_t* done, int* error) {
  while (*done < size) {
    ssize_t n = ::recv(socket.get(), static_cast<char*>(data) + *done, size - *done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return Moved::kMore;
    if (n <= 0) {
      *error = n < 0 ? errno : 0;
      return Moved::kFailed;
    }
    *done += static_cast<size_t>(n);
  }
  return Moved::kAll;
}

Moved write_some(const FileDescriptor& socket, const void* data, size_t size, size_t* done) {
  while (*done < size) {
    ssize_t n =
        ::send(socket.get(), static_cast<const char*>(data) + *done, size - *done, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return Moved::kMore;
    if (n < 0) return Moved::kFailed;
    *done += static_cast<size_t>(n);
  }
  return Moved::kAll;
}

}  // namespace smddp::liveness
