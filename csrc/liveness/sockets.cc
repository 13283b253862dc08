#include "liveness/sockets.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "common/errno_status.h"

namespace smddp::liveness {
namespace {

constexpr int kBacklog = 4096;  // the kernel takes less if its limit is lower

struct Address {
  sockaddr_storage storage = {};
  socklen_t size = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

Address address_of(const Contact& contact) {
  Address address;
  if (contact.ipv6 != 0) {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(contact.port);
    std::memcpy(&v6->sin6_addr, contact.ip.data(), sizeof v6->sin6_addr);
    address.size = sizeof *v6;
  } else {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(contact.port);
    std::memcpy(&v4->sin_addr, contact.ip.data(), sizeof v4->sin_addr);
    address.size = sizeof *v4;
  }
  return address;
}

// Of the first interface that is up and no loopback, bridges of containers last.
std::string own_ip() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return "127.0.0.1";
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  std::string of_bridge;
  for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
    bool up = (at->ifa_flags & IFF_UP) != 0 && (at->ifa_flags & IFF_LOOPBACK) == 0;
    if (!up || at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET) continue;
    char text[INET_ADDRSTRLEN] = {};
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr, text,
                sizeof text);
    std::string name = at->ifa_name;
    bool bridge = name.starts_with("docker") || name.starts_with("br-") || name.starts_with("veth");
    if (!bridge) return text;
    of_bridge = text;
  }
  return of_bridge.empty() ? "127.0.0.1" : of_bridge;
}

FileDescriptor open_socket(const Contact& contact) {
  int family = contact.ipv6 != 0 ? AF_INET6 : AF_INET;
  return FileDescriptor(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

}  // namespace

Result<FileDescriptor> listen_at(const std::string& ip, Contact* contact) {
  std::string at = ip.empty() ? own_ip() : ip;
  contact->ipv6 = at.find(':') != std::string::npos ? 1 : 0;
  contact->port = 0;
  if (::inet_pton(contact->ipv6 != 0 ? AF_INET6 : AF_INET, at.c_str(), contact->ip.data()) != 1)
    return Status(Code::kInvalid, "'" + at + "' is no IP address");
  FileDescriptor socket = open_socket(*contact);
  Address address = address_of(*contact);
  if (!socket || ::bind(socket.get(), address.get(), address.size) != 0 ||
      ::listen(socket.get(), kBacklog) != 0 ||
      ::getsockname(socket.get(), address.get(), &address.size) != 0) {
    return errno_status("no port at " + at + " for questions whether this process lives");
  }
  contact->port =
      ntohs(contact->ipv6 != 0 ? reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port
                               : reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port);
  return socket;
}

int begin_connect(const Contact& to, FileDescriptor* out) {
  FileDescriptor socket = open_socket(to);
  if (!socket) return errno;
  linger at_close = {1, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_close, sizeof at_close);
  int at_once = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  Address address = address_of(to);
  if (::connect(socket.get(), address.get(), address.size) != 0 && errno != EINPROGRESS)
    return errno;
  *out = std::move(socket);
  return 0;
}

int connect_error(const FileDescriptor& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
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
