// TCP sockets that never block: their addresses, ports to listen at, connections. Called by the rooms that
// reach other hosts without libfabric.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <span>
#include <string>

#include "common/file_descriptor.h"
#include "common/status.h"

namespace smddp {

class SocketAddress {
 public:
  SocketAddress() = default;  // of no family
  explicit SocketAddress(const sockaddr_in& v4) { *as_v4() = v4; }
  explicit SocketAddress(const sockaddr_in6& v6) { *as_v6() = v6; }
  // An address of IPv4 or IPv6 as text; kInvalid for other text.
  static Result<SocketAddress> parse(const std::string& ip, uint16_t port);
  // The bytes of a sockaddr_in or sockaddr_in6; of no family if they are neither.
  static SocketAddress of(std::span<const uint8_t> bytes);

  int family() const { return storage_.ss_family; }  // AF_UNSPEC: of no family
  uint16_t port() const;
  void set_port(uint16_t port);
  std::span<const uint8_t> ip() const;  // 4 or 16 bytes, in the network's order
  std::string ip_text() const;          // "192.0.2.2"; "" of no family
  std::string text() const;             // "192.0.2.2:4711", "[2001:db8::1]:4711"

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage_); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const;

 private:
  sockaddr_in* as_v4() { return reinterpret_cast<sockaddr_in*>(&storage_); }
  sockaddr_in6* as_v6() { return reinterpret_cast<sockaddr_in6*>(&storage_); }
  const sockaddr_in* as_v4() const { return reinterpret_cast<const sockaddr_in*>(&storage_); }
  const sockaddr_in6* as_v6() const { return reinterpret_cast<const sockaddr_in6*>(&storage_); }

  sockaddr_storage storage_ = {};
};

// Listens at `at`, for connections whose other side speaks first. If its port is 0, the kernel chooses one and `at`
// gets it. kUnavailable with the reason.
Result<FileDescriptor> listen_at(SocketAddress* at);
// The kernel keeps a connection to this listening socket back until it says something, up to half a minute: until
// then it takes no descriptor.
void defer_accept(int listener);
// Of each connection that this listening socket accepts the kernel asks the other side after a minute without a word:
// a firewall that forgets idle connections, after five minutes or more, does not forget it.
void keep_alive(int listener);
// What is sent later leaves at once, however short it is.
void send_at_once(const FileDescriptor& socket);
// Begins to connect, to send at once: 0, or the errno.
int begin_connect(const SocketAddress& to, FileDescriptor* socket);
// The error of a connection that is established, or has failed: 0, or an errno.
int connect_error(const FileDescriptor& socket);

}  // namespace smddp
