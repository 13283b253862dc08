#include "transport/ofi/silent_connections.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/tcp.h>  // its tcp_info knows tcpi_bytes_received, unlike that of <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <memory>

#include "common/tcp_sockets.h"

namespace smddp::ofi {
namespace {

// Between two looks. A flood took 650 descriptors within the second that it was before.
constexpr uint64_t kLookNs = 50'000'000;
constexpr uint32_t kSilentMs = 10'000;
constexpr size_t kSilent = 64;
// So many descriptors stay free for the program.
constexpr int kReserve = 192;
// As many more descriptors than before are worth a look at all of them.
constexpr int kMore = 16;
constexpr int kEstablished = 1;  // <netinet/tcp.h>'s TCP_ESTABLISHED
// Each provider's request to connect has more.
constexpr uint64_t kHelloBytes = 16;

// A socket of this process that is bound to one of `ports`.
template <class F>
void for_each_socket(const std::vector<uint16_t>& ports, F&& f) {
  auto close = [](DIR* directory) { ::closedir(directory); };
  std::unique_ptr<DIR, decltype(close)> all(::opendir("/proc/self/fd"));
  while (const dirent* entry = all ? ::readdir(all.get()) : nullptr) {
    int fd = std::atoi(entry->d_name), type = 0;
    sockaddr_storage storage = {};
    socklen_t size = sizeof storage, type_size = sizeof type;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0 ||
        ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_size) != 0 || type != SOCK_STREAM)
      continue;
    SocketAddress own = SocketAddress::of({reinterpret_cast<const uint8_t*>(&storage), size});
    if (std::find(ports.begin(), ports.end(), own.port()) != ports.end() &&
        own.family() != AF_UNSPEC)
      f(fd);
  }
}

bool listens(int fd) {
  int on = 0;
  socklen_t size = sizeof on;
  return ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &size) == 0 && on != 0;
}

int most_descriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > INT_MAX) return INT_MAX;
  return static_cast<int>(limit.rlim_cur);
}

FileDescriptor any_descriptor() {
  return FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

struct Silent {
  int fd;
  uint32_t ms;
};

}  // namespace

void SilentConnections::guard(std::span<const uint8_t> address) {
  SocketAddress at = SocketAddress::of(address);
  if (at.family() == AF_UNSPEC || at.port() == 0) return;
  for_each_socket({at.port()}, [&](int fd) {
    if (!listens(fd)) return;
    defer_accept(fd);
    keep_alive(fd);
    ports_.push_back(at.port());
  });
  if (!spare_) spare_ = any_descriptor();
}

void SilentConnections::look(uint64_t now_ns) {
  if (now_ns < next_ns_ || ports_.empty()) return;
  next_ns_ = now_ns + kLookNs;
  // The lowest number that is free tells how many are taken.
  FileDescriptor probe = any_descriptor();
  const int taken = probe ? probe.get() : INT_MAX;
  const bool scarce = taken > most_descriptors() - kReserve;
  if (!scarce && !waiting_ && taken < seen_ + kMore) return;
  seen_ = taken;
  std::vector<Silent> silent;
  for (FileDescriptor* held : {&probe, &spare_}) *held = FileDescriptor();
  for_each_socket(ports_, [&](int fd) {
    tcp_info info = {};
    socklen_t size = sizeof info;
    bool known = ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
    if (known && info.tcpi_state == kEstablished && info.tcpi_bytes_received < kHelloBytes)
      silent.push_back({fd, info.tcpi_last_data_recv});
  });
  std::sort(silent.begin(), silent.end(), [](auto& a, auto& b) { return a.ms > b.ms; });
  size_t most = scarce ? kSilent / 4 : kSilent;
  for (size_t i = 0; i < silent.size(); ++i) {
    if (silent[i].ms > kSilentMs || silent.size() - i > most) ::shutdown(silent[i].fd, SHUT_RDWR);
  }
  spare_ = any_descriptor();
  waiting_ = !silent.empty();
}

}  // namespace smddp::ofi
