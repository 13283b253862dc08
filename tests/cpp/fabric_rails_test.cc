// Endpoints of several rails over real libfabric, and the choice of a rail.
#include <poll.h>

#include <array>
#include <optional>

#include "fabric_flow.h"
#include "transport/rail_balance.h"

namespace smddp::ofi {
namespace {

TEST(RailBalance, FewestBytesOutstanding) {
  RailBalance balance;
  balance.set_rails(3);
  balance.sent(0, 300);
  balance.sent(1, 100);
  balance.sent(2, 200);
  EXPECT_EQ(balance.choose(), 1u);
  balance.finished(2, 150);  // given more than rail 1, but done with more of it
  EXPECT_EQ(balance.choose(), 2u);
}

TEST(RailBalance, AmongEqualsTheRailThatWasGivenLeast) {
  RailBalance balance;
  balance.set_rails(4);
  for (size_t rail : {3, 0, 2}) {
    balance.sent(rail, 100 + rail);
    balance.finished(rail, 100 + rail);
  }
  EXPECT_EQ(balance.choose(), 1u);
  balance.sent(1, 1000);
  balance.finished(1, 1000);
  EXPECT_EQ(balance.choose(), 0u);
  EXPECT_EQ(RailBalance().choose(), 0u);
}

// `at_once`: the provider completes each send immediately, so no bytes are outstanding.
TEST(RailBalance, EvenLoadForAnySizes) {
  for (bool at_once : {false, true}) {
    RailBalance balance;
    balance.set_rails(5);
    std::vector<uint64_t> load(5, 0);
    uint64_t largest = 0;
    for (size_t i = 0; i < 1000; ++i) {
      uint64_t bytes = 1 + i * 7919 % 10000;
      largest = std::max(largest, bytes);
      size_t rail = balance.choose();
      balance.sent(rail, bytes);
      if (at_once) balance.finished(rail, bytes);
      load[rail] += bytes;
    }
    auto [least, most] = std::minmax_element(load.begin(), load.end());
    EXPECT_LE(*most - *least, largest);
  }
}

// As bytes for other peers are outstanding on one rail only.
TEST(RailBalance, TheChunksOfAFlowTakeTurns) {
  RailBalance balance;
  balance.set_rails(2);
  balance.sent(1, RailBalance::kFarBehind);
  EXPECT_EQ(balance.choose(), 0u);
  for (uint32_t index : {0, 1, 2, 3}) EXPECT_EQ(balance.choose_for_chunk(index), index % 2);
  balance.sent(1, 1);
  for (uint32_t index : {0, 1, 2, 3}) EXPECT_EQ(balance.choose_for_chunk(index), 0u);
}

// Repeats three chunks and the short message that asks for more of them.
TEST(RailBalance, ShortMessagesBetweenChunks) {
  RailBalance balance;
  balance.set_rails(2);
  std::array<uint64_t, 2> load = {};
  for (size_t i = 0; i < 400; ++i) {
    uint64_t bytes = i % 4 == 3 ? 100 : 131072;
    size_t rail = balance.choose();
    balance.sent(rail, bytes);
    balance.finished(rail, bytes);
    load[rail] += bytes;
  }
  EXPECT_LE(std::max(load[0], load[1]) - std::min(load[0], load[1]), 131072u);
}

TEST(RailBalance, ASlowRailDoesNotMakeUpForAllOfIt) {
  RailBalance balance;
  balance.set_rails(2);
  balance.sent(1, 1);  // stays outstanding
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(balance.choose(), 0u);
    balance.sent(0, RailBalance::kRemembered / 4);
    balance.finished(0, RailBalance::kRemembered / 4);
  }
  balance.finished(1, 1);
  uint64_t alone = 0;
  while (balance.choose() == 1) {
    balance.sent(1, 4096);
    balance.finished(1, 4096);
    alone += 4096;
  }
  EXPECT_EQ(alone, RailBalance::kRemembered);
}

// An interface named twice gets two rails: real ones, with connections of their own.
class Rails : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!Endpoint::open(options("lo")).ok()) GTEST_SKIP() << "no tcp;ofi_rxm on lo";
  }
  static Options options(const std::string& interfaces) {
    return {"", "tcp;ofi_rxm", interfaces, GetParam()};
  }
  static TestEndpoint open_endpoint(uint32_t id, const std::string& interfaces) {
    return ofi::open_endpoint(id, options(interfaces));
  }
};

INSTANTIATE_TEST_SUITE_P(Transfers, Rails, testing::Values("writes", "messages"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(Rails, UnequalNumbersOfNics) {
  const char* lists[] = {"lo", "lo,lo", "lo,127.0.0.1,lo"};
  for (const char* mine : lists) {
    for (const char* theirs : lists) {
      SCOPED_TRACE(std::string(mine) + " and " + theirs);
      TestEndpoint a = open_endpoint(0, mine), b = open_endpoint(1, theirs);
      exchange(a, b);
    }
  }
}

TEST_P(Rails, WakesUpForEachRail) {
  TestEndpoint b = open_endpoint(1, "lo,lo"), c = open_endpoint(2, "lo,lo");
  EXPECT_TRUE(says(b.endpoint->facts().description, "lo (127.0.0.1), lo (127.0.0.1)"));
  ASSERT_GE(b.endpoint->wait_fd(), 0);
  Peer to_b = introduce(c, b);
  for (size_t i = 0; i < 6; ++i) {
    ASSERT_TRUE(c.send(to_b, 88, true));
    for (uint64_t until = now_ns() + kPatience; b.inbox.messages < i + 1;) {
      ASSERT_LT(now_ns(), until);
      c.progress();
      if (b.progress() > 0 || b.endpoint->sleep_limit_ms() == 1) continue;
      pollfd waiting = {b.endpoint->wait_fd(), POLLIN, 0};
      ::poll(&waiting, 1, 5);
    }
  }
}

// One broken connection of one rail loses the peer. The loss is told once.
TEST_P(Rails, LossIsToldOnce) {
  TestEndpoint a = open_endpoint(0, "lo,lo");
  std::optional<TestEndpoint> gone = open_endpoint(1, "lo,lo");
  Peer to_gone = introduce(a, *gone);
  for (int i = 0; i < 4; ++i) a.send(to_gone, 1000);
  drive({&a, &*gone}, [&] { return gone->inbox.messages == 4; });
  gone.reset();
  drive({&a}, [&] {
    a.send(to_gone, 1000);
    return a.inbox.lost.size() == 1;
  });
  settle({&a}, kSecond / 20);
  EXPECT_TRUE(a.endpoint->idle());
}

}  // namespace
}  // namespace smddp::ofi
