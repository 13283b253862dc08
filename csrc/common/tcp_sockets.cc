#include "common/tcp_sockets.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace smddp {

static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));

namespace {

constexpr int kBacklog = 4096;  // the kernel takes less if its limit is lower

FileDescriptor open_socket(int family) {
  return FileDescriptor(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

}  // namespace

Result<SocketAddress> SocketAddress::parse(const std::string& ip, uint16_t port) {
  SocketAddress address;
  if (::inet_pton(AF_INET, ip.c_str(), &address.as_v4()->sin_addr) == 1) {
    address.storage_.ss_family = AF_INET;
  } else if (::inet_pton(AF_INET6, ip.c_str(), &address.as_v6()->sin6_addr) == 1) {
    address.storage_.ss_family = AF_INET6;
  } else {
    return Status(Code::kInvalid, "'" + ip + "' is no IP address");
  }
  address.set_port(port);
  return address;
}

SocketAddress SocketAddress::of(std::span<const uint8_t> bytes) {
  SocketAddress address;
  if (bytes.size() > sizeof address.storage_) return {};
  std::memcpy(&address.storage_, bytes.data(), bytes.size());
  return address.size() == bytes.size() ? address : SocketAddress();
}

socklen_t SocketAddress::size() const {
  if (family() == AF_INET) return sizeof(sockaddr_in);
  if (family() == AF_INET6) return sizeof(sockaddr_in6);
  return 0;
}

// The port has the same place in both kinds of addresses.
uint16_t SocketAddress::port() const { return ntohs(as_v4()->sin_port); }

void SocketAddress::set_port(uint16_t port) { as_v4()->sin_port = htons(port); }

std::span<const uint8_t> SocketAddress::ip() const {
  if (family() == AF_INET6) return as_v6()->sin6_addr.s6_addr;
  return {reinterpret_cast<const uint8_t*>(&as_v4()->sin_addr), sizeof(in_addr)};
}

std::string SocketAddress::ip_text() const {
  char host[INET6_ADDRSTRLEN] = {};
  if (size() > 0) ::inet_ntop(family(), ip().data(), host, sizeof host);
  return host;
}

std::string SocketAddress::text() const {
  std::string host = ip_text(), port_text = ":" + std::to_string(port());
  if (host.empty()) return "no address";
  return family() == AF_INET6 ? "[" + host + "]" + port_text : host + port_text;
}

Result<FileDescriptor> listen_at(SocketAddress* at) {
  FileDescriptor socket = open_socket(at->family());
  socklen_t size = at->size();
  if (!socket || ::bind(socket.get(), at->get(), size) != 0 ||
      ::listen(socket.get(), kBacklog) != 0 || ::getsockname(socket.get(), at->get(), &size) != 0) {
    return errno_status("can't listen at " + at->text());
  }
  defer_accept(socket.get());
  return socket;
}

void defer_accept(int listener) {
  int seconds = 30;
  ::setsockopt(listener, IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof seconds);
}

void keep_alive(int listener) {
  int on = 1, seconds = 60;
  ::setsockopt(listener, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(listener, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
}

void send_at_once(const FileDescriptor& socket) {
  int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

int begin_connect(const SocketAddress& to, FileDescriptor* out) {
  FileDescriptor socket = open_socket(to.family());
  if (!socket) return errno;
  send_at_once(socket);
  if (::connect(socket.get(), to.get(), to.size()) != 0 && errno != EINPROGRESS) return errno;
  *out = std::move(socket);
  return 0;
}

int connect_error(const FileDescriptor& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
}

}  // namespace smddp
