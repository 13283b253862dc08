// Messages between endpoints over real libfabric, also to peers that are absent, die or make no progress.
#include <poll.h>
#include <sys/resource.h>

#include <atomic>
#include <optional>
#include <set>

#include "fabric_endpoints.h"

namespace smddp::ofi {
namespace {

INSTANTIATE_TEST_SUITE_P(Providers, Fabric, testing::ValuesIn(kMessageWays), name_of_param);

TEST_P(Fabric, DescribesItselfAndMovesSmallAndLargestBothWays) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  EXPECT_TRUE(says(a.endpoint->facts().description,
                   std::string(GetParam().provider) + " on lo (127.0.0.1)"));
  EXPECT_GE(a.endpoint->facts().max_message, 128u * 1024 + 88);
  EXPECT_TRUE(a.endpoint->idle());
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  std::vector<size_t> sizes = {sizeof(Stamp), 64, 88, 4096, 70000, a.endpoint->facts().max_message};
  for (size_t size : sizes) {
    ASSERT_TRUE(a.send(to_b, size));
    ASSERT_TRUE(b.send(to_a, size));
  }
  drive({&a, &b}, [&] {
    return a.inbox.messages == sizes.size() && b.inbox.messages == sizes.size() &&
           a.endpoint->idle() && b.endpoint->idle();
  });
  for (uint32_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(b.inbox.seen[0][i], sizes[i]);
    EXPECT_EQ(a.inbox.seen[1][i], sizes[i]);
  }
  EXPECT_EQ(a.endpoint->counters().messages_sent, sizes.size());
  EXPECT_EQ(a.endpoint->counters().bytes_sent, a.endpoint->counters().bytes_received);
  EXPECT_EQ(a.endpoint->counters().receive_errors, 0u);
}

// More messages at once than the receiver has buffers for. Their sizes lie around every limit at
// which a provider may change its way of sending.
TEST_P(Fabric, FloodFromMany) {
  TestEndpoint to = open_endpoint(100);
  const size_t sizes[] = {sizeof(Stamp), 88,    2000,  2048,  2049,
                          3000,          4096,  4097,  8000,  9000,
                          16000,         16384, 16385, 40000, to.endpoint->facts().max_message};
  std::vector<TestEndpoint> from;
  for (uint32_t i = 0; i < 4; ++i) from.push_back(open_endpoint(i));
  std::vector<TestEndpoint*> all = {&to};
  for (TestEndpoint& sender : from) all.push_back(&sender);
  const size_t kEach = scaled(1000);
  std::vector<Peer> peers;
  for (TestEndpoint& sender : from) peers.push_back(introduce(sender, to));
  drive(all, [&] {
    for (size_t i = 0; i < from.size(); ++i) {
      while (from[i].sent[peers[i]] < kEach) {
        size_t size = sizes[(from[i].sent[peers[i]] + i) % std::size(sizes)];
        if (!from[i].send(peers[i], size, size <= kControlMessage)) break;
      }
      for (int turn = 0; turn < 3; ++turn) from[i].progress();
    }
    return to.inbox.messages == kEach * from.size();
  });
  for (uint32_t i = 0; i < from.size(); ++i) EXPECT_EQ(to.inbox.seen[i].size(), kEach);
  EXPECT_EQ(to.endpoint->counters().receive_errors, 0u);
}

// The receiver makes no progress for a while: the number of messages in flight stays bounded, and
// all of them arrive once the receiver goes on.
TEST_P(Fabric, BackPressure) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  Peer to_b = introduce(a, b);
  ASSERT_TRUE(a.send(to_b, 88));
  drive({&a, &b}, [&] { return b.inbox.messages == 1 && a.endpoint->idle(); });
  const size_t kMost = scaled(1000);
  size_t posted = 1;
  for (uint64_t last = now_ns(); now_ns() - last < kSecond / 2 && posted < kMost;) {
    while (posted < kMost && a.send(to_b, a.endpoint->facts().max_message)) {
      ++posted;
      last = now_ns();
    }
    a.progress();
  }
  EXPECT_EQ(b.inbox.messages, 1u);
  EXPECT_LT(posted, kMost) << "nothing held the sender back";
  drive({&a, &b}, [&] { return b.inbox.messages == posted && a.endpoint->idle(); });
  EXPECT_TRUE(a.inbox.lost.empty());
}

TEST_P(Fabric, EqualAddressesAreOnePeerUntilItIsLost) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1), c = open_endpoint(2);
  Peer to_b = introduce(a, b), to_c = introduce(a, c);
  EXPECT_NE(to_b, to_c);
  EXPECT_EQ(introduce(a, b), to_b);
  EXPECT_FALSE(a.endpoint->has_lost_peers());
  a.endpoint->give_up(to_b, "asked to");
  EXPECT_TRUE(a.endpoint->is_lost(to_b));
  EXPECT_TRUE(a.endpoint->has_lost_peers());
  Peer again = introduce(a, b);
  EXPECT_NE(again, to_b);
  EXPECT_FALSE(a.endpoint->is_lost(again));
  EXPECT_EQ(introduce(a, c), to_c);
}

// Over TCP each peer takes up to two file descriptors, and the usual soft limit is 1,024.
TEST_P(Fabric, ManyPeersRaiseTheSoftLimitOfOpenFiles) {
  TestEndpoint a = open_endpoint(0);
  if (a.endpoint->facts().ip.empty()) GTEST_SKIP() << "no IP addresses to invent peers of";
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit low = {60, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &low);
  std::vector<uint8_t> address = a.endpoint->facts().address;
  auto limit_of_open_files = [] {
    rlimit now;
    getrlimit(RLIMIT_NOFILE, &now);
    return now.rlim_cur;
  };
  for (uint8_t port = 1; port <= 17; ++port) {
    EXPECT_EQ(limit_of_open_files(), port <= 15 ? rlim_t{60} : before.rlim_max) << port;
    address[48 + 2] = port;  // of the first NIC
    ASSERT_TRUE(a.endpoint->add_peer(address).ok());
  }
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST_P(Fabric, RefusesAddressesItCantUse) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  std::vector<uint8_t> good = b.endpoint->facts().address;
  EXPECT_EQ(a.endpoint->add_peer({}).status().code(), Code::kInvalid);
  std::vector<uint8_t> cut(good.begin(), good.end() - 1);
  EXPECT_EQ(a.endpoint->add_peer(cut).status().code(), Code::kInvalid);
  std::vector<uint8_t> longer = good;
  longer.push_back(0);
  EXPECT_EQ(a.endpoint->add_peer(longer).status().code(), Code::kInvalid);
  std::vector<uint8_t> other = good;
  other[0] ^= 0xff;  // the wire protocol
  Status status = a.endpoint->add_peer(other).status();
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_TRUE(says(status, "SMDDP_FABRIC_PROVIDER"));
}

TEST_P(Fabric, OnePeerCantTakeAllBuffers) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1), c = open_endpoint(2);
  Peer to_b = introduce(a, b), to_c = introduce(a, c);
  for (bool control : {false, true}) {
    std::vector<MessageBuffer*> of_b, of_c;
    std::set<std::byte*> distinct;
    for (MessageBuffer* got; (got = a.endpoint->acquire(to_b, control)) != nullptr;) {
      of_b.push_back(got);
    }
    for (MessageBuffer* got; (got = a.endpoint->acquire(to_c, control)) != nullptr;) {
      of_c.push_back(got);
    }
    EXPECT_GE(of_b.size(), 8u);
    EXPECT_GE(of_c.size(), of_b.size() / 3);
    for (std::vector<MessageBuffer*>* held : {&of_b, &of_c}) {
      for (MessageBuffer* buffer : *held) {
        EXPECT_EQ(buffer->capacity, control ? kControlMessage : a.endpoint->facts().max_message);
        EXPECT_TRUE(distinct.insert(buffer->data).second);
        Peer to = held == &of_b ? to_b : to_c;
        write_message(buffer->data, 100, {a.id, a.sent[to]++});
        a.endpoint->post(buffer, 100);
      }
    }
    drive({&a, &b, &c}, [&] { return a.endpoint->idle(); });
    EXPECT_TRUE(a.send(to_b, 100, control));
  }
}

// The receiver sleeps on the descriptor, as the engine does, already before the first contact.
TEST_P(Fabric, WakesUpOnFirstContact) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  if (b.endpoint->wait_fd() < 0) GTEST_SKIP() << "no descriptor to wait on";
  // ofi_rxm may not wake a sleeper for the first message of a connection.
  bool loses_wakeups = std::string(GetParam().provider).ends_with("ofi_rxm");
  EXPECT_EQ(b.endpoint->sleep_limit_ms() > 0, loses_wakeups);
  std::atomic<bool> stop = false;
  auto sleep_on = [&stop](TestEndpoint& self, const std::function<bool()>& done) {
    uint64_t deadline = now_ns() + kPatience;
    while (!done() && !stop && now_ns() < deadline) {
      if (self.progress() > 0 || self.endpoint->sleep_limit_ms() == 1) continue;
      pollfd waiting = {self.endpoint->wait_fd(), POLLIN, 0};
      int limit = self.endpoint->sleep_limit_ms();
      ASSERT_GE(::poll(&waiting, 1, limit < 0 ? 1000 : limit), 0);
    }
  };
  constexpr size_t kMessages = 20;
  std::atomic<bool> received = false;
  std::thread receiver([&] {
    sleep_on(b, [&] { return b.inbox.messages == kMessages; });
    received = true;
    sleep_on(b, [] { return false; });
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  Peer to_b = introduce(a, b);
  for (size_t i = 0; i < kMessages; ++i) {
    size_t size = i % 2 == 0 ? 88 : a.endpoint->facts().max_message;
    sleep_on(a, [&] { return a.send(to_b, size); });
  }
  sleep_on(a, [&] { return a.endpoint->idle() && received; });
  EXPECT_TRUE(received);
  stop = true;
  receiver.join();
}

// ---- peers that are absent, die or make no progress

// Either the absent peer is reported lost or its messages wait. Another peer gets all of its
// messages meanwhile.
TEST_P(Fabric, AbsentPeerDelaysNoOtherPeer) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  std::optional<TestEndpoint> gone = open_endpoint(2);
  Peer to_b = introduce(a, b), to_gone = introduce(a, *gone);
  gone.reset();
  while (a.send(to_gone, 1000)) {
  }
  while (a.send(to_gone, 88, true)) {
  }
  size_t count = scaled(100), data = 0, control = 0;
  drive({&a, &b}, [&] {
    if (data < count) data += a.send(to_b, 30000);
    if (control < count) control += a.send(to_b, 88, true);
    return b.inbox.messages == 2 * count;
  });
  EXPECT_EQ(a.inbox.lost.count(to_b), 0u);
  // Closing with messages to absent and to silent peers under way neither hangs nor leaks.
  while (a.send(to_b, a.endpoint->facts().max_message)) {
  }
  for (int i = 0; i < 100; ++i) a.progress();
}

TEST_P(Fabric, PeerThatDiesInTheMiddleDelaysNoOtherPeer) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  std::optional<TestEndpoint> gone = open_endpoint(2);
  Peer to_b = introduce(a, b), to_gone = introduce(a, *gone);
  ASSERT_TRUE(a.send(to_gone, 1000));
  ASSERT_TRUE(a.send(to_b, 1000));
  drive({&a, &b, &*gone},
        [&] { return gone->inbox.messages == 1 && b.inbox.messages == 1 && a.endpoint->idle(); });
  while (a.send(to_gone, a.endpoint->facts().max_message)) {
  }
  a.progress();
  gone.reset();
  size_t count = scaled(100), data = 0;
  drive({&a, &b}, [&] {
    if (data < count) data += a.send(to_b, 30000);
    a.send(to_gone, 88, true);
    return b.inbox.messages == count + 1;
  });
  settle({&a, &b}, kSecond / 10);
  EXPECT_EQ(a.inbox.lost.count(to_b), 0u);
  RecordProperty("told", a.inbox.lost.count(to_gone) == 1 ? a.inbox.lost[to_gone] : "nothing");
  if (a.inbox.lost.count(to_gone) == 1) {
    // A message to a lost peer is dropped, and the loss is not told again.
    ASSERT_TRUE(a.send(to_gone, 88, true));
    settle({&a}, kSecond / 20);
    EXPECT_EQ(a.inbox.lost.size(), 1u);
  }
}

TEST_P(Fabric, ClosesWhileMessagesArrive) {
  for (int repetition = 0; repetition < 10; ++repetition) {
    TestEndpoint a = open_endpoint(0);
    std::optional<TestEndpoint> gone = open_endpoint(2);
    Peer to_gone = introduce(a, *gone);
    drive({&a, &*gone}, [&] {
      while (a.send(to_gone, a.endpoint->facts().max_message)) {
      }
      return gone->inbox.messages > 3;
    });
    gone.reset();
    settle({&a}, kSecond / 100);
  }
}

}  // namespace
}  // namespace smddp::ofi
