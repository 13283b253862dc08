// Strangers connect to every port of a rank and say nothing: the rank keeps descriptors for its program, and makes
// groups. Over each version of libfabric.
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>

#include "common/clock.h"
#include "common/tcp_sockets.h"
#include "rank_processes.h"
#include "transport/ofi/silent_connections.h"

namespace smddp {
namespace {

constexpr size_t kConnections = 1500;  // to each port
constexpr rlim_t kLimit = 1024;        // of the rank, hard
constexpr size_t kFree = 100;          // which its program needs

// Of this process.
std::vector<SocketAddress> listening() {
  std::vector<SocketAddress> found;
  DIR* all = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(all)) {
    int fd = atoi(entry->d_name), on = 0;
    sockaddr_storage at{};
    socklen_t size = sizeof at, on_size = sizeof on;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &on_size) != 0 || on == 0) continue;
    getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size);
    SocketAddress address = SocketAddress::of({reinterpret_cast<const uint8_t*>(&at), size});
    if (address.family() != AF_UNSPEC) found.push_back(address);
  }
  closedir(all);
  return found;
}

std::vector<FileDescriptor> open_files(size_t count) {
  std::vector<FileDescriptor> files;
  for (size_t i = 0; i < count; ++i) files.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  return files;
}

// What was wrong, or "".
std::string be_flooded(RankContext& c) {
  std::vector<int> in(1000, c.rank), out(2000);
  if (Status gathered = c.run(gather_of(in, out, c.ranks)); !gathered) return gathered.message();
  if (c.rank == 0) {
    rlimit limit{kLimit, kLimit};
    setrlimit(RLIMIT_NOFILE, &limit);
    std::vector<uint8_t> ports;
    for (const SocketAddress& port : listening()) {
      const std::string text = port.text() + " ";
      ports.insert(ports.end(), text.begin(), text.end());
    }
    (void)c.store.set("ports", ports);
  }
  for (int turn = 0; out[0] == 0; ++turn) {
    if (c.rank == 0 && turn % 100 == 0) {
      if (!open_files(kFree).back())
        return "no descriptor is left for the program in turn " + std::to_string(turn);
      in[0] = c.store.has("enough") ? 1 : 0;
    }
    if (Status gathered = c.run(gather_of(in, out, c.ranks)); !gathered) return gathered.message();
  }
  auto again = c.group.subgroup(c.store, "again", {0, 1});
  if (!again) return "no further group: " + again.status().message();
  auto op = gather_of(in, out, c.ranks);
  again.value()->submit(op, {}, false);
  c.engine.wait(*op);
  return op->status().message();
}

void flood(const std::string& ports, size_t said, std::vector<FileDescriptor>& connections) {
  std::istringstream all(ports);
  for (std::string port; all >> port;) {
    size_t colon = port.rfind(':');
    auto at = SocketAddress::parse(port.substr(0, colon),
                                   static_cast<uint16_t>(std::stoi(port.substr(colon + 1))));
    for (size_t i = 0; i < kConnections; ++i) {
      FileDescriptor connection(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      ASSERT_TRUE(connection) << "of the test's own";
      timeval patience{0, 200'000};
      setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
      if (connect(connection.get(), at.value().get(), at.value().size()) != 0) continue;
      if (said > 0) (void)!write(connection.get(), "GET /", said);
      connections.push_back(std::move(connection));
    }
  }
}

// A rank's connection, six strangers, a moment later 64 more. Each stranger has said a byte.
TEST(SilentConnections, TheOldestGoFirstMoreIfDescriptorsAreScarceAndAllAfterTenSeconds) {
  FileDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  socklen_t size = sizeof at;
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* address = reinterpret_cast<sockaddr*>(&at);
  ASSERT_EQ(bind(listener.get(), address, size), 0);
  ASSERT_EQ(listen(listener.get(), 128), 0);
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size);
  ofi::SilentConnections silent;
  silent.guard({reinterpret_cast<const uint8_t*>(&at), size});
  int deferred = 0;
  size = sizeof deferred;
  getsockopt(listener.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &deferred, &size);
  EXPECT_GT(deferred, 0);

  std::vector<FileDescriptor> theirs, ours;
  auto connect_many = [&](size_t count, size_t said) {
    for (size_t i = 0; i < count; ++i) {
      theirs.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      ASSERT_EQ(connect(theirs.back().get(), address, sizeof at), 0);
      ASSERT_EQ(write(theirs.back().get(), "a rank's request to connect", said),
                static_cast<ssize_t>(said));
      ours.emplace_back(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
  };
  auto ended = [&](size_t from, size_t count) {
    char byte;
    return std::count_if(&theirs[from], &theirs[from] + count, [&](const FileDescriptor& each) {
      return recv(each.get(), &byte, 1, MSG_DONTWAIT) == 0;
    });
  };
  connect_many(1, 16);
  connect_many(6, 1);
  usleep(100'000);
  connect_many(64, 1);
  silent.look(now_ns());
  EXPECT_EQ(ended(1, 6), 6);
  EXPECT_EQ(ended(7, 64), 0);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit scarce{300, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &scarce);
  silent.look(now_ns() + 1'000'000'000);
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(ended(7, 64), 48);
  usleep(10'200'000);
  silent.look(now_ns());
  EXPECT_EQ(ended(7, 64), 64);
  EXPECT_EQ(ended(0, 1), 0);
}

// The parameter: bytes that each stranger says before it falls silent.
class Strangers : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Said, Strangers, testing::Values(0, 5));

TEST_P(Strangers, LeaveDescriptorsForTheProgramAndForNewGroups) {
  size_t said = GetParam();
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max < 3 * kConnections)
    GTEST_SKIP() << "this process may have too few descriptors";
  Processes ranks("AB", be_flooded);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  auto ports = ranks.store().get({"ports"}, "none");
  ASSERT_TRUE(ports.ok());
  const auto& text = ports.value()[0];
  std::vector<FileDescriptor> connections;
  flood({text.begin(), text.end()}, said, connections);
  EXPECT_GT(connections.size(), kLimit);
  usleep(2'000'000);
  say(ranks.store(), "enough");
  ranks.expect_ends();
}

}  // namespace
}  // namespace smddp
