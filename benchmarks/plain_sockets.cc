// One rank of AllGather and ReduceScatter of fp32 over plain TCP sockets, in turns (see turns.h): the least
// that a message between hosts costs without libfabric, and without an engine.
//
//     RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 plain_sockets PIPES STORE INTERFACE HOST [doubling]
//
// PIPES is the directory with the named pipes of all ranks, STORE an empty directory that all ranks can read
// and write, HOST a name that the ranks of one host share and no others. With `doubling` an AllGather takes a
// message per power of two, if there are so many hosts, of one rank each: half of them pass on what they have.
//
// Each rank has one connection to the rank with its number on every other host. A message is a header as
// large as the core's and one block per rank of the sender's host or one sum; it goes out by one sendmsg() and comes in by
// one recvmsg() right into the output. A rank that finds nothing yields the processor. The ranks of a host
// pass blocks through memory that they share.
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "common/file_descriptor.h"
#include "file_store.h"
#include "transport/wire.h"
#include "turns.h"

namespace smddp {
namespace {

constexpr size_t kLargestBuffer = 256 << 10;  // the whole of an operation

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

size_t number(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) fail(std::string(variable) + " is not set");
  return static_cast<size_t>(std::atoi(text));
}

in_addr address_of(const std::string& interface) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) fail("getifaddrs");
  in_addr found{};
  for (ifaddrs* a = all; a != nullptr; a = a->ifa_next) {
    if (interface == a->ifa_name && a->ifa_addr != nullptr && a->ifa_addr->sa_family == AF_INET)
      found = reinterpret_cast<sockaddr_in*>(a->ifa_addr)->sin_addr;
  }
  ::freeifaddrs(all);
  return found;
}

// Both ways between this rank and one on another host. Operations follow one another, and the receiver knows how
// long each message is: it never reads into the next one.
class Connection {
 public:
  explicit Connection(FileDescriptor socket) : socket_(std::move(socket)) {
    int on = 1;
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  }

  void begin(const void* send, void* receive, size_t bytes) {
    out_ = {{{&out_header_, sizeof out_header_}, {const_cast<void*>(send), bytes}}};
    in_ = {{{&in_header_, sizeof in_header_}, {receive, bytes}}};
    send_left_ = receive_left_ = sizeof(wire::Header) + bytes;
    out_header_.bytes = bytes;
    ++out_header_.seq;
  }

  bool over() const { return send_left_ == 0 && receive_left_ == 0; }

  // True if bytes have moved.
  bool send() {
    if (send_left_ == 0) return false;
    msghdr message{};
    message.msg_iov = out_.data();
    message.msg_iovlen = out_.size();
    return moved(::sendmsg(socket_.get(), &message, MSG_NOSIGNAL), out_, send_left_);
  }

  bool receive() {
    if (receive_left_ == 0) return false;
    msghdr message{};
    message.msg_iov = in_.data();
    message.msg_iovlen = in_.size();
    if (!moved(::recvmsg(socket_.get(), &message, 0), in_, receive_left_)) return false;
    if (receive_left_ == 0 && in_header_.seq != out_header_.seq)
      fail("a message of another operation");
    return true;
  }

 private:
  using Parts = std::array<iovec, 2>;
  static bool moved(ssize_t bytes, Parts& parts, size_t& left) {
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (bytes <= 0) fail("a connection");
    left -= static_cast<size_t>(bytes);
    for (iovec& part : parts) {
      size_t of_part = std::min(part.iov_len, static_cast<size_t>(bytes));
      part.iov_base = static_cast<std::byte*>(part.iov_base) + of_part;
      part.iov_len -= of_part;
      bytes -= static_cast<ssize_t>(of_part);
    }
    return true;
  }

  FileDescriptor socket_;
  wire::Header out_header_{}, in_header_{};
  Parts out_{}, in_{};
  size_t send_left_ = 0, receive_left_ = 0;
};

// The memory of a host's ranks: for each rank two buffers that take turns, and the number of what it has published last.
class HostMemory {
 public:
  HostMemory(const std::filesystem::path& path, size_t rank, size_t ranks)
      : rank_(rank), ranks_(ranks) {
    FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (file.get() < 0 || ::ftruncate(file.get(), static_cast<off_t>(ranks * sizeof(Part))) != 0)
      fail(path);
    void* at =
        ::mmap(nullptr, ranks * sizeof(Part), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (at == MAP_FAILED) fail("mmap");
    parts_ = static_cast<Part*>(at);
  }

  // Where this rank publishes next. No rank still reads there, as all have seen what was published before.
  float* own() { return parts_[rank_].buffers[(published_ + 1) % 2]; }
  void publish() { parts_[rank_].published.store(++published_, std::memory_order_release); }
  // Of the publication of this rank's latest number.
  const float* wait_for(size_t rank) const {
    while (parts_[rank].published.load(std::memory_order_acquire) < published_) ::sched_yield();
    return parts_[rank].buffers[published_ % 2];
  }
  size_t rank() const { return rank_; }
  size_t ranks() const { return ranks_; }

 private:
  struct Part {
    alignas(64) std::atomic<uint64_t> published;
    alignas(64) float buffers[2][kLargestBuffer / sizeof(float)];
  };
  size_t rank_, ranks_;
  uint64_t published_ = 0;
  Part* parts_;
};

class Member {
 public:
  Member(Store& store, const std::filesystem::path& directory, const std::string& interface,
         const std::string& host, bool doubling)
      : doubling_(doubling),
        rank_(number("RANK")),
        memory_(directory / ("memory-" + host), number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE")),
        hosts_(number("WORLD_SIZE") / memory_.ranks()),
        connections_(connect(store, interface)) {}

  size_t host() const { return rank_ / memory_.ranks(); }

  void all_gather(const float* part, float* whole, size_t count) {
    std::memcpy(whole + rank_ * count, part, count * sizeof(float));
    if (doubling_) return double_blocks(whole, count);
    exchange(
        [&](size_t other) {
          return std::pair(part, whole + (other * memory_.ranks() + memory_.rank()) * count);
        },
        count);
    if (memory_.ranks() == 1) return;
    for (size_t h = 0; h < hosts_; ++h)
      std::memcpy(memory_.own() + h * count, whole + (h * memory_.ranks() + memory_.rank()) * count,
                  count * sizeof(float));
    memory_.publish();
    for (size_t local = 0; local < memory_.ranks(); ++local) {
      if (local == memory_.rank()) continue;
      const float* from = memory_.wait_for(local);
      for (size_t h = 0; h < hosts_; ++h)
        std::memcpy(whole + (h * memory_.ranks() + local) * count, from + h * count,
                    count * sizeof(float));
    }
  }

  void reduce_scatter(const float* whole, float* part, size_t count) {
    size_t all = hosts_ * memory_.ranks() * count;
    sums_.assign(hosts_ * count, 0);
    received_.resize(hosts_ * count);
    if (memory_.ranks() > 1) {
      std::memcpy(memory_.own(), whole, all * sizeof(float));
      memory_.publish();
    }
    for (size_t local = 0; local < memory_.ranks(); ++local) {
      const float* from = local == memory_.rank() ? whole : memory_.wait_for(local);
      for (size_t h = 0; h < hosts_; ++h)
        add(&sums_[h * count], from + (h * memory_.ranks() + memory_.rank()) * count, count);
    }
    exchange(
        [&](size_t other) { return std::pair(&sums_[other * count], &received_[other * count]); },
        count);
    std::memcpy(part, &sums_[host() * count], count * sizeof(float));
    for (size_t h = 0; h < hosts_; ++h)
      if (h != host()) add(part, &received_[h * count], count);
  }

 private:
  static void add(float* to, const float* from, size_t count) {
    for (size_t i = 0; i < count; ++i) to[i] += from[i];
  }

  // A rank connects to those of the hosts before its own, and says which host it is on.
  std::vector<Connection> connect(Store& store, const std::string& interface);

  void double_blocks(float* whole, size_t count) {
    for (size_t n = 1; n < hosts_; n *= 2) {  // blocks that are here
      size_t other = host() ^ n, bytes = n * count * sizeof(float);
      connection(other).begin(whole + host() / n * n * count, whole + other / n * n * count, bytes);
      finish();
    }
  }

  Connection& connection(size_t other) { return connections_[other - (other > host() ? 1 : 0)]; }

  // `blocks(host)`: what goes to that host, and where what it sends belongs.
  template <class Blocks>
  void exchange(Blocks&& blocks, size_t count) {
    for (size_t i = 1; i < hosts_; ++i) {  // each host begins with another one
      size_t other = (host() + i) % hosts_;
      auto [out, in] = blocks(other);
      connection(other).begin(out, in, count * sizeof(float));
      connection(other).send();
    }
    finish();
  }

  void finish() {
    for (;;) {
      bool moved = false, over = true;
      for (Connection& connection : connections_) {
        moved |= connection.send();
        moved |= connection.receive();
        over &= connection.over();
      }
      if (over) return;
      if (!moved) ::sched_yield();
    }
  }

  bool doubling_;
  size_t rank_;
  HostMemory memory_;
  size_t hosts_;
  std::vector<Connection> connections_;  // by host, without this one
  std::vector<float> sums_, received_;
};

std::vector<Connection> Member::connect(Store& store, const std::string& interface) {
  FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_addr = address_of(interface);
  socklen_t size = sizeof own;
  auto* name = reinterpret_cast<sockaddr*>(&own);
  if (::bind(listener.get(), name, size) != 0 || ::listen(listener.get(), 64) != 0 ||
      ::getsockname(listener.get(), name, &size) != 0)
    fail("a listening socket");
  auto* bytes = reinterpret_cast<const uint8_t*>(&own);
  if (!store.set("rank" + std::to_string(rank_), {bytes, bytes + sizeof own})) fail("the store");
  std::vector<FileDescriptor> sockets(hosts_);
  for (uint32_t h = 0; h < host(); ++h) {
    auto values =
        store.get({"rank" + std::to_string(h * memory_.ranks() + memory_.rank())}, "stop");
    if (!values) fail(values.status().message());
    sockaddr_in to;
    std::memcpy(&to, values.value()[0].data(), sizeof to);
    sockets[h] = FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(sockets[h].get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0)
      fail("connect");
    auto from = static_cast<uint32_t>(host());
    if (::send(sockets[h].get(), &from, sizeof from, 0) != sizeof from) fail("send");
  }
  for (size_t n = host() + 1; n < hosts_; ++n) {
    FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    uint32_t from = 0;
    if (::recv(socket.get(), &from, sizeof from, MSG_WAITALL) != sizeof from || from >= hosts_)
      fail("accept");
    sockets[from] = std::move(socket);
  }
  std::vector<Connection> connections;
  for (size_t h = 0; h < hosts_; ++h)
    if (h != host()) connections.emplace_back(std::move(sockets[h]));
  return connections;
}

int call(void* context, const turn_case* what) {
  auto& rank = *static_cast<Member*>(context);
  auto *part = static_cast<float*>(what->part), *whole = static_cast<float*>(what->whole);
  if (what->dtype != TURN_FP32 || what->op == TURN_ALL_REDUCE || what->op == TURN_ALL_GATHER_64)
    return 1;
  if (what->op == TURN_ALL_GATHER) {
    rank.all_gather(part, whole, what->count);
  } else {
    rank.reduce_scatter(whole, part, what->count);
  }
  return 0;
}

int barrier(void* context) {
  float part = 0;
  std::vector<float> whole(number("WORLD_SIZE"));
  static_cast<Member*>(context)->all_gather(&part, whole.data(), 1);
  return 0;
}

}  // namespace
}  // namespace smddp

int main(int argc, char** argv) {
  using namespace smddp;
  bool doubling = argc == 6 && std::string(argv[5]) == "doubling";
  if (argc != 5 && !doubling) {
    std::fprintf(stderr, "usage: plain_sockets PIPES STORE INTERFACE HOST [doubling]\n");
    return 1;
  }
  FileStore store(argv[2], std::chrono::seconds(60));
  Member rank(store, argv[2], argv[3], argv[4], doubling);
  turn_program program{static_cast<int>(number("RANK")),
                       static_cast<int>(number("WORLD_SIZE")),
                       "plain sockets",
                       &rank,
                       call,
                       barrier,
                       nullptr,
                       nullptr};
  return turn_serve(&program, argv[1]);
}
