// Peers that are absent, die or make no progress, over real libfabric.
#include <optional>

#include "fabric_endpoints.h"

namespace smddp::ofi {
namespace {

INSTANTIATE_TEST_SUITE_P(Providers, Fabric, testing::ValuesIn(kMessageWays), name_of_param);

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

// Closing with messages to absent and to silent peers under way neither hangs nor leaks.
TEST_P(Fabric, ClosesWithMessagesUnderWay) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  std::optional<TestEndpoint> gone = open_endpoint(2);
  Peer to_b = introduce(a, b), to_gone = introduce(a, *gone);
  gone.reset();
  while (a.send(to_b, a.endpoint->facts().max_message)) {
  }
  while (a.send(to_gone, 88, true)) {
  }
  for (int i = 0; i < 100; ++i) a.progress();
}

}  // namespace
}  // namespace smddp::ofi
