#include "device/unix_sockets.h"

#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "common/random.h"

namespace smddp::device {
namespace {

struct UnixAddress {
  sockaddr_un address{};
  socklen_t bytes;
  UnixAddress(const char* label, const SocketName& name) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text = std::string("smddp-") + label + "-";
    for (uint8_t byte : name) {
      text += kDigits[byte >> 4];
      text += kDigits[byte & 15];
    }
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, text.data(), text.size());
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

FileDescriptor unix_socket(int flags = 0) {
  return FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
}

}  // namespace

Result<FileDescriptor> listen_as(const char* label, SocketName* name, int flags) {
  if (!fill_random(name->data(), name->size()))
    return Status(Code::kUnavailable, "the kernel gives no random bytes");
  FileDescriptor listener = unix_socket(flags);
  UnixAddress address(label, *name);
  if (!listener || bind(listener.get(), address.get(), address.bytes) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0)
    return errno_status(std::string("could not open a socket for the ") + label + " of GPU memory");
  return listener;
}

Result<FileDescriptor> connect_to(const char* label, const SocketName& name) {
  FileDescriptor socket = unix_socket();
  UnixAddress address(label, name);
  if (!socket || connect(socket.get(), address.get(), address.bytes) != 0)
    return errno_status("could not connect to the owner's socket");
  return socket;
}

bool of_this_user(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

}  // namespace smddp::device
