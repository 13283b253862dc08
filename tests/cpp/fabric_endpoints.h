// Shared by the tests of endpoints: endpoints of one process over real libfabric, on loopback only.
// A provider that the installed libfabric does not offer is skipped, with the reason.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "results.h"
#include "transport/ofi/endpoint.h"

namespace smddp::ofi {

inline Options loopback(const std::string& provider, const std::string& transfer = "") {
  return {"", provider, "lo", transfer};
}

inline constexpr uint64_t kSecond = 1000000000ull;
inline constexpr uint64_t kPatience = 60 * kSecond;  // a loaded machine is no failure

// The start of a test message: its sender and its number. The bytes after it follow from both.
struct Stamp {
  uint32_t source;
  uint32_t index;
};

inline std::byte pattern(const Stamp& stamp, size_t at) {
  return static_cast<std::byte>(stamp.source * 131 + stamp.index * 17 + at * 7 + at / 251);
}

inline void write_message(std::byte* data, size_t size, Stamp stamp) {
  std::memcpy(data, &stamp, sizeof stamp);
  for (size_t i = sizeof stamp; i < size; ++i) data[i] = pattern(stamp, i);
}

// A message that says how many chunks of a flow have been written, for flows of one process.
class WrittenChunks {
 public:
  virtual ~WrittenChunks() = default;
  virtual void on_written(uint32_t chunks) = 0;
};
inline constexpr uint32_t kWritten =
    0xffffffff;  // as the source of a stamp, and as its index the chunks

class Inbox : public Sink {
 public:
  void on_message(const std::byte* data, size_t size) override {
    ASSERT_GE(size, sizeof(Stamp));
    Stamp stamp;
    std::memcpy(&stamp, data, sizeof stamp);
    if (stamp.source == kWritten) {
      WrittenChunks* flow = nullptr;
      std::memcpy(&flow, data + sizeof stamp, sizeof flow);
      return flow->on_written(stamp.index);
    }
    size_t wrong = 0;
    for (size_t i = sizeof stamp; i < size; ++i) wrong += data[i] != pattern(stamp, i);
    EXPECT_EQ(wrong, 0u) << "of " << size << " bytes from " << stamp.source;
    EXPECT_TRUE(seen[stamp.source].emplace(stamp.index, size).second) << "delivered twice";
    ++messages;
  }
  void on_peer_lost(Peer to, const Status& why) override {
    EXPECT_FALSE(why.message().empty());
    EXPECT_TRUE(lost.emplace(to, why.message()).second) << "told twice";
    loss = why.code();
  }

  std::map<uint32_t, std::map<uint32_t, size_t>> seen;  // source -> index -> size
  std::map<Peer, std::string> lost;
  Code loss = Code::kOk;  // of the last one
  size_t messages = 0;
};

// An endpoint, the messages that it has received, and how many it has sent to each peer.
struct TestEndpoint {
  std::unique_ptr<Endpoint> endpoint;
  Inbox inbox;
  uint32_t id = 0;
  std::map<Peer, uint32_t> sent;

  int progress() {
    Result<int> handled = endpoint->poll(inbox);
    EXPECT_TRUE(handled.ok()) << handled.status().message();
    return handled.ok() ? handled.value() : 0;
  }
  // False if no buffer is free for `to` now.
  bool send(Peer to, size_t size, bool control = false) {
    MessageBuffer* buffer = endpoint->acquire(to, control);
    if (buffer == nullptr) return false;
    EXPECT_LE(size, buffer->capacity);
    write_message(buffer->data, size, {id, sent[to]++});
    endpoint->post(buffer, size);
    return true;
  }
};

inline TestEndpoint open_endpoint(uint32_t id, const Options& options) {
  TestEndpoint made;
  made.id = id;
  Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::open(options);
  EXPECT_TRUE(endpoint.ok()) << endpoint.status().message();
  made.endpoint = std::move(endpoint.value());
  return made;
}

inline Peer introduce(TestEndpoint& from, const TestEndpoint& to) {
  Result<Peer> peer = from.endpoint->add_peer(to.endpoint->facts().address);
  EXPECT_TRUE(peer.ok()) << peer.status().message();
  return peer.value();
}

// Progresses `endpoints` in turn until `done`, or fails.
inline void drive(const std::vector<TestEndpoint*>& endpoints, const std::function<bool()>& done) {
  uint64_t deadline = now_ns() + kPatience;
  while (!done()) {
    int handled = 0;
    for (TestEndpoint* each : endpoints) handled += each->progress();
    if (handled == 0) std::this_thread::yield();
    if (now_ns() > deadline) {
      ADD_FAILURE() << "not done in time";
      return;
    }
  }
}

// Progresses `endpoints` until there has been no event for `quiet` ns.
inline void settle(const std::vector<TestEndpoint*>& endpoints, uint64_t quiet) {
  uint64_t last = now_ns(), deadline = last + kPatience;
  for (uint64_t now = last; now - last < quiet && now < deadline; now = now_ns()) {
    int handled = 0;
    for (TestEndpoint* each : endpoints) handled += each->progress();
    if (handled > 0) last = now_ns();
    std::this_thread::yield();
  }
}

// A provider, and how chunks travel over it; empty: its default.
struct Way {
  const char* provider;
  const char* transfer;
};

class Fabric : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::open(options());
    if (!endpoint) GTEST_SKIP() << endpoint.status().message();
    // The short name of a provider may have opened another one.
    if (!endpoint.value()->facts().description.starts_with(std::string(GetParam().provider) +
                                                           " on ")) {
      GTEST_SKIP() << "found " << endpoint.value()->facts().description;
    }
  }
  static Options options() { return loopback(GetParam().provider, GetParam().transfer); }
  static TestEndpoint open_endpoint(uint32_t id) { return ofi::open_endpoint(id, options()); }
  // A provider that moves large messages slowly is given fewer.
  size_t scaled(size_t count) const {
    return std::string(GetParam().provider) == "udp;ofi_rxd" ? count / 10 + 1 : count;
  }
};

inline std::string name_of_param(const testing::TestParamInfo<Way>& param) {
  std::string name = param.param.provider;
  if (*param.param.transfer != 0) name += std::string("_") + param.param.transfer;
  for (char& c : name) c = c == ';' ? '_' : c;
  return name;
}

// Not "sockets": its fi_send connects synchronously, so an absent peer stops the whole endpoint.
// Not "net", the early form of "tcp" in libfabric 1.17: it passes, but leaks memory of its own.
inline const Way kMessageWays[] = {{"tcp", ""}, {"tcp;ofi_rxm", ""}, {"udp;ofi_rxd", ""}};

}  // namespace smddp::ofi
