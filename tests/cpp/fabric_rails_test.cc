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
  std::optional<TestEndpoint> open_endpoint(uint32_t id, const std::string& interfaces) {
    auto endpoint = Endpoint::open({"", "tcp;ofi_rxm", interfaces, GetParam()});
    if (!endpoint) return std::nullopt;
    TestEndpoint made;
    made.id = id;
    made.endpoint = std::move(endpoint.value());
    return made;
  }
};

INSTANTIATE_TEST_SUITE_P(Transfers, Rails, testing::Values("writes", "messages"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(Rails, UnequalNumbersOfNics) {
  const char* lists[] = {"lo", "lo,lo", "lo,127.0.0.1,lo"};
  for (const char* mine : lists) {
    for (const char* theirs : lists) {
      SCOPED_TRACE(std::string(mine) + " and " + theirs);
      std::optional<TestEndpoint> a = open_endpoint(0, mine), b = open_endpoint(1, theirs);
      if (!a || !b) GTEST_SKIP() << "no tcp;ofi_rxm on lo";
      auto to_b = a->endpoint->add_peer(b->endpoint->facts().address);
      auto to_a = b->endpoint->add_peer(a->endpoint->facts().address);
      ASSERT_TRUE(to_b.ok() && to_a.ok());
      size_t count = 60;
      Flow there(300 * 20000 + 1, 20000, 1), back(300 * 20000 + 1, 20000, 2);
      bool regions = a->endpoint->facts().writes;
      EXPECT_EQ(there.open(*b, to_a.value()), regions);
      EXPECT_EQ(back.open(*a, to_b.value()), regions);
      drive({&*a, &*b}, [&] {
        if (regions) {
          there.send(*a, to_b.value());
          back.send(*b, to_a.value());
        }
        if (a->sent[to_b.value()] < count) a->send(to_b.value(), 30000);
        if (b->sent[to_a.value()] < count) b->send(to_a.value(), 100, true);
        return a->inbox.messages == count && b->inbox.messages == count &&
               (!regions || (there.over() && back.over())) && a->endpoint->idle() &&
               b->endpoint->idle();
      });
      EXPECT_EQ(b->endpoint->counters().foreign_writes, 0u);
    }
  }
}

TEST_P(Rails, WakesUpForEachRail) {
  std::optional<TestEndpoint> a = open_endpoint(0, "lo"), b = open_endpoint(1, "lo,lo"),
                              c = open_endpoint(2, "lo,lo");
  if (!a || !b || !c) GTEST_SKIP() << "no tcp;ofi_rxm on lo";
  EXPECT_NE(b->endpoint->facts().description.find("lo (127.0.0.1), lo (127.0.0.1)"),
            std::string::npos)
      << b->endpoint->facts().description;
  ASSERT_GE(b->endpoint->wait_fd(), 0);
  Peer to_b = c->endpoint->add_peer(b->endpoint->facts().address).value();
  for (size_t i = 0; i < 6; ++i) {
    ASSERT_TRUE(c->send(to_b, 88, true));
    for (uint64_t until = now_ns() + kPatience; b->inbox.messages < i + 1;) {
      ASSERT_LT(now_ns(), until);
      c->progress();
      if (b->progress() > 0 || b->endpoint->sleep_limit_ms() == 1) continue;
      pollfd waiting = {b->endpoint->wait_fd(), POLLIN, 0};
      ::poll(&waiting, 1, 5);
    }
  }
}

// One broken connection of one rail loses the peer. The loss is told once.
TEST_P(Rails, LossIsToldOnce) {
  std::optional<TestEndpoint> a = open_endpoint(0, "lo,lo"), gone = open_endpoint(1, "lo,lo");
  if (!a || !gone) GTEST_SKIP() << "no tcp;ofi_rxm on lo";
  Peer to_gone = a->endpoint->add_peer(gone->endpoint->facts().address).value();
  for (int i = 0; i < 4; ++i) a->send(to_gone, 1000);
  drive({&*a, &*gone}, [&] { return gone->inbox.messages == 4; });
  gone.reset();
  drive({&*a}, [&] {
    a->send(to_gone, 1000);
    return a->inbox.lost.size() == 1;
  });
  settle({&*a}, kSecond / 20);
  EXPECT_TRUE(a->endpoint->idle());
}

TEST(RailChoice, ImpossibleInterfaceList) {
  for (const char* list : {"lo,nic7", "lo,", ",lo", "lo,lo,lo,lo,lo,lo,lo,lo,lo"}) {
    auto endpoint = Endpoint::open({"", "tcp;ofi_rxm", list});
    ASSERT_FALSE(endpoint.ok()) << list;
    EXPECT_NE(endpoint.status().message().find(std::string("'") + list + "'"), std::string::npos)
        << endpoint.status().message();
  }
}

}  // namespace
}  // namespace smddp::ofi
