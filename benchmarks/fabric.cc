// Latency and bandwidth of an endpoint between two processes over loopback, for one way to transfer
// data. Prints one line per size:
//
//   fabric_benchmark [provider [messages|writes [interface]]]
//
// Latency: half a round trip with one transfer in each direction, median. Bandwidth: 32 transfers
// in one direction, or fewer (at least 8) if these have 64 MiB. Transfers larger than a chunk are
// sent in chunks; CHUNK in the environment sets the bytes of a chunk. Some bytes of each transfer
// are checked.
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/clock.h"
#include "transport/ofi/open.h"

using namespace smddp;
using namespace smddp::transport;

namespace {

constexpr size_t kSmallest = 1024, kLargest = 16 << 20;
constexpr uint64_t kTimeoutNs = 20'000'000'000;
constexpr size_t kWarmUp = 5;  // round trips

[[noreturn]] void give_up(const std::string& why) {
  std::printf("%s\n", why.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

// One of the two processes. A receiver sends a control message when it is ready; its size tells it
// from data. If the transfer has receive regions, the message holds the Grant.
class Side : Sink {
 public:
  Side(const ofi::Options& options, int socket, size_t chunk) {
    auto opened = ofi::open(options);
    if (!opened) give_up(opened.status().message());
    endpoint_ = std::move(opened.value());
    std::vector<uint8_t> address = endpoint_->facts().address;
    std::vector<uint8_t> other(address.size());
    if (write(socket, address.data(), address.size()) < 0 ||
        read(socket, other.data(), other.size()) != static_cast<ssize_t>(other.size())) {
      give_up("no address from the other side");
    }
    peer_ = endpoint_->add_peer(other).value();
    in_.resize(kLargest);
    out_.resize(kLargest);
    for (size_t i = 0; i < out_.size(); ++i) out_[i] = static_cast<std::byte>(i * 31 + i / 255);
    chunk_ = !writes() ? endpoint_->facts().max_message : chunk;
  }
  const Facts& facts() const { return endpoint_->facts(); }

  // Prepares the memory for one transfer and tells the other side.
  void expect(size_t bytes) {
    received_ = 0;
    expected_ = bytes;
    wire::Grant grant = {};
    grant.chunk_bytes = static_cast<uint32_t>(chunk_);
    grant.bytes = bytes;
    if (writes() && !endpoint_->open_region(peer_, in_.data(), bytes, &region_, &grant))
      give_up("no region");
    MessageBuffer* buffer = nullptr;
    drive([&] { return (buffer = endpoint_->acquire(peer_, true)) != nullptr; });
    std::memcpy(buffer->data, &grant, sizeof grant);
    endpoint_->post(buffer, sizeof grant);
  }
  void await() {
    drive([&] { return received_ >= expected_; });
    size_t step = std::max<size_t>(1, expected_ / 16);
    for (size_t at = 0; at < expected_; at += step) {
      if (writes() && in_[at] != out_[at]) give_up("corrupt");
    }
    if (writes()) endpoint_->close_region(region_, false);
    received_ = 0;
  }
  void send(size_t bytes) {
    drive([&] { return granted_; });
    granted_ = false;
    uint32_t pending = 0;
    for (size_t at = 0; at < bytes; at += chunk_) {
      size_t size = std::min(chunk_, bytes - at);
      drive([&] {
        if (writes()) {
          return endpoint_->write(peer_, grant_, static_cast<uint32_t>(at / chunk_),
                                  out_.data() + at, size, &pending);
        }
        MessageBuffer* buffer = endpoint_->acquire(peer_, false);
        if (buffer == nullptr) return false;
        std::memcpy(buffer->data, out_.data() + at, size);
        endpoint_->post(buffer, size);
        return true;
      });
    }
    drive([&] { return pending == 0; });
    if (writes()) tell((bytes + chunk_ - 1) / chunk_);
  }
  void finish() {
    drive([&] { return endpoint_->idle(); });
    for (int i = 0; i < 1000; ++i) (void)endpoint_->poll(*this);
  }

 private:
  bool writes() const { return endpoint_->facts().writes; }
  template <class Done>
  void drive(Done&& done) {
    uint64_t until = now_ns() + kTimeoutNs;
    while (!done()) {
      auto moved = endpoint_->poll(*this);
      if (!moved) give_up(moved.status().message());
      if (moved.value() == 0) sched_yield();
      if (now_ns() > until) give_up("not done within 20 s");
    }
  }
  // That so many chunks have been written; on this connection the message comes after them.
  void tell(uint64_t chunks) {
    MessageBuffer* buffer = nullptr;
    drive([&] { return (buffer = endpoint_->acquire(peer_, true)) != nullptr; });
    std::memcpy(buffer->data, &chunks, sizeof chunks);
    endpoint_->post(buffer, sizeof chunks);
  }
  void on_message(const std::byte* data, size_t size) override {
    if (size == sizeof(uint64_t) && writes()) {
      uint64_t chunks = 0;
      std::memcpy(&chunks, data, sizeof chunks);
      received_ = std::min<size_t>(chunks * chunk_, expected_);
      return;
    }
    if (size != sizeof grant_) {
      std::memcpy(in_.data() + std::min(received_, in_.size() - size), data, size);
      received_ += size;
      return;
    }
    std::memcpy(&grant_, data, sizeof grant_);
    granted_ = true;
  }
  void on_peer_lost(Peer, const Status& why) override { give_up(why.message()); }

  std::unique_ptr<Transport> endpoint_;
  Peer peer_ = 0;
  size_t chunk_ = 0, received_ = 0, expected_ = 0;
  uint32_t region_ = 0;
  bool granted_ = false;
  wire::Grant grant_ = {};
  std::vector<std::byte> in_, out_;
};

// Half a round trip, median.
double latency_us(Side& side, size_t bytes, bool first) {
  size_t rounds = std::clamp<size_t>((64 << 20) / bytes, 8, 1000);
  std::vector<double> latencies;
  for (size_t round = 0; round < rounds + kWarmUp; ++round) {
    uint64_t start = now_ns();
    side.expect(bytes);
    if (first) side.send(bytes);
    side.await();
    if (!first) side.send(bytes);
    if (round >= kWarmUp) latencies.push_back(static_cast<double>(now_ns() - start) / 2000);
  }
  auto middle = latencies.begin() + latencies.size() / 2;
  std::nth_element(latencies.begin(), middle, latencies.end());
  return *middle;
}

// MB/s from the first side to the other one, which answers with one byte at the end.
double bandwidth_mbps(Side& side, size_t bytes, bool first) {
  size_t transfers = std::clamp<size_t>((64 << 20) / bytes, 8, 32);
  uint64_t start = now_ns();
  for (size_t i = 0; i < transfers; ++i) {
    if (first) {
      side.send(bytes);
    } else {
      side.expect(bytes);
      side.await();
    }
  }
  if (first) {
    side.expect(1);
    side.await();
  } else {
    side.send(1);
  }
  double seconds = static_cast<double>(now_ns() - start) / 1e9;
  return static_cast<double>(bytes * transfers) / seconds / 1e6;
}

void run(const ofi::Options& options, int socket, bool first) {
  size_t chunk = 256 << 10;
  if (const char* set = std::getenv("CHUNK")) chunk = std::strtoul(set, nullptr, 10);
  Side side(options, socket, chunk);
  if (first) {
    std::printf("# %s, %s, chunks of %zu KiB\n%10s %12s %12s\n", side.facts().description.c_str(),
                side.facts().writes ? "writes" : "messages", chunk >> 10, "bytes", "latency us",
                "MB/s");
  }
  for (size_t bytes = kSmallest; bytes <= kLargest; bytes *= 4) {
    double latency = latency_us(side, bytes, first);
    double bandwidth = bandwidth_mbps(side, bytes, first);
    if (first) {
      std::printf("%10zu %12.1f %12.0f\n", bytes, latency, bandwidth);
      std::fflush(stdout);
    }
  }
  side.finish();
}

}  // namespace

int main(int argc, char** argv) {
  ofi::Options options{"", argc > 1 ? argv[1] : "", argc > 3 ? argv[3] : "lo",
                       argc > 2 ? argv[2] : ""};
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) give_up("socketpair");
  pid_t child = fork();
  run(options, sockets[child == 0], child != 0);
  if (child == 0) std::_Exit(0);
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}
