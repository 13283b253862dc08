// Receive regions over real libfabric: chunks straight into memory that the receiver has opened.
#include <optional>
#include <random>

#include "fabric_flow.h"
#include "tcp_connections.h"

namespace smddp::ofi {
namespace {

INSTANTIATE_TEST_SUITE_P(Providers, Fabric,
                         testing::Values(Way{"tcp", "writes"}, Way{"tcp;ofi_rxm", "writes"},
                                         Way{"net", "writes"}, Way{"udp;ofi_rxd", "writes"}),
                         name_of_param);

// Both directions, sizes from one byte to megabytes, several regions at once between three endpoints. The bytes of
// all chunks that a sender speaks of are in memory when its word is taken: Flow compares them then. Many chunks are
// under way at once, and some leave from message buffers.
TEST_P(Fabric, ManyRegionsAtOnceOfAllSizes) {
  std::mt19937 random(7);
  std::vector<TestEndpoint> endpoints;
  for (uint32_t i = 0; i < 3; ++i) endpoints.push_back(open_endpoint(i));
  std::vector<TestEndpoint*> all;
  Peer peers[3][3] = {};
  for (TestEndpoint& from : endpoints) {
    all.push_back(&from);
    for (TestEndpoint& to : endpoints) {
      if (&from != &to) peers[from.id][to.id] = introduce(from, to);
    }
  }
  struct Route {
    TestEndpoint *from, *to;
    std::unique_ptr<Flow> flow;
  };
  size_t chunks = 0, chunk_bytes = 0;
  for (int repetition = 0; repetition < 3; ++repetition) {
    std::vector<Route> routes;
    for (size_t i = 0; i < scaled(24); ++i) {
      TestEndpoint& from = endpoints[random() % 3];
      TestEndpoint& to = endpoints[(from.id + 1 + random() % 2) % 3];
      size_t bytes = 1 + random() % (size_t{1} << (random() % 21));
      size_t chunk = 1 + random() % (bytes < 5000 ? bytes : bytes / 2);
      if (bytes / chunk > 200) chunk = bytes / 200;
      routes.push_back({&from, &to, std::make_unique<Flow>(bytes, chunk, random())});
      Flow& flow = *routes.back().flow;
      ASSERT_TRUE(flow.open(to, peers[to.id][from.id])) << bytes << " in " << chunk;
      EXPECT_TRUE(wire::check(flow.grant, flow.source.size()));
      chunks += flow.chunks();
      chunk_bytes += bytes;
    }
    drive(all, [&] {
      bool done = true;
      for (Route& route : routes) {
        route.flow->send(*route.from, peers[route.from->id][route.to->id]);
        done = done && route.flow->over();
      }
      return done;
    });
    for (Route& route : routes) {
      route.flow->check_margins();
      route.flow->close();
    }
  }
  for (TestEndpoint& each : endpoints) {
    const Counters& counters = each.endpoint->counters();
    EXPECT_EQ(counters.foreign_writes, 0u);
    chunks -= counters.chunks_sent;
    chunk_bytes -= counters.chunk_bytes_sent;
  }
  EXPECT_EQ(chunks, 0u) << "more than were counted";
  EXPECT_EQ(chunk_bytes, 0u);
}

// A region is closed before its sender has sent all chunks, and the sender sends no more of it: all other
// transfers between the two go on.
TEST_P(Fabric, ARegionMayBeClosedEarly) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  for (uint32_t turn = 0; turn < 30; ++turn) {
    Flow late(200 * 20000, 20000, turn), next(100 * 20000, 20000, turn + 1);
    ASSERT_TRUE(late.open(b, to_a));
    ASSERT_TRUE(next.open(b, to_a));
    drive({&a, &b}, [&] {
      if (late.sent < 20) late.send(a, to_b);
      late.tell(a, to_b);
      next.send(a, to_b);
      return late.sent >= 20 && late.arrived == late.sent && late.pending() == 0 && next.over();
    });
    late.close();
    next.close();
    ASSERT_TRUE(a.send(to_b, 5000));
    drive({&a, &b}, [&] { return b.inbox.messages == turn + 1 && a.endpoint->idle(); });
    late.check_margins();
  }
  EXPECT_EQ(b.endpoint->counters().regions, 0u);
  EXPECT_EQ(b.endpoint->counters().receive_errors, 0u);
  EXPECT_TRUE(a.inbox.lost.empty() && b.inbox.lost.empty());
}

// As after a failure, with a rank that was stopped as it sent: other groups use the same connection.
TEST_P(Fabric, LateChunksOfAnAbandonedRegionGoNowhere) {
  if (std::string(GetParam().provider) != "tcp")
    GTEST_SKIP() << "keys or addresses are the provider's";
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  for (uint32_t turn = 0; turn < 20; ++turn) {
    Flow late(200 * 20000, 20000, turn), next(100 * 20000, 20000, turn + 1);
    ASSERT_TRUE(late.open(b, to_a));
    drive({&a, &b}, [&] {
      if (late.sent < 20) late.send(a, to_b);
      return late.sent >= 20 && late.pending() == 0;
    });
    settle({&a, &b}, kSecond / 100);
    late.close(true);
    std::fill(late.memory.begin(), late.memory.end(), Flow::kUntouched);
    ASSERT_TRUE(next.open(b, to_a));
    drive({&a, &b}, [&] {
      late.send_chunks(a, to_b);
      next.send(a, to_b);
      return late.sent == late.chunks() && late.pending() == 0 && next.over();
    });
    next.close();
    ASSERT_TRUE(a.send(to_b, 5000));
    drive({&a, &b}, [&] { return b.inbox.messages == turn + 1 && a.endpoint->idle(); });
    EXPECT_EQ(std::count(late.memory.begin(), late.memory.end(), Flow::kUntouched),
              static_cast<std::ptrdiff_t>(late.memory.size()));
  }
  EXPECT_EQ(b.endpoint->counters().foreign_writes, 0u);
  EXPECT_TRUE(a.inbox.lost.empty() && b.inbox.lost.empty());
}

// The connection breaks while the kernel has chunks to send, and the next message has a new one: it says of no chunk that
// was lost that it is there (Flow compares the bytes).
TEST_P(Fabric, WhatABrokenConnectionLostIsNotTakenForWritten) {
  if (std::string(GetParam().provider) == "udp;ofi_rxd") GTEST_SKIP() << "no connections";
  for (uint32_t turn = 0; turn < 20; ++turn) {
    TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
    Peer to_b = introduce(a, b), to_a = introduce(b, a);
    Flow warm(5, 1, 1), cut(8 * 16384, 16384, turn);
    ASSERT_TRUE(warm.open(b, to_a));
    ASSERT_TRUE(cut.open(b, to_a));
    drive({&a, &b}, [&] {
      warm.send(a, to_b);
      return warm.over();
    });
    drive({&a}, [&] {
      cut.send_chunks(a, to_b);
      return cut.sent == cut.chunks();
    });
    settle({&a}, kSecond / 20);
    reset_connections();
    settle({&a, &b}, kSecond / 20);
    for (int i = 0; i < 5; ++i) {
      cut.tell(a, to_b);
      settle({&a, &b}, kSecond / 20);
    }
    EXPECT_FALSE(cut.complete()) << "nothing was lost";
    EXPECT_TRUE(cut.lost || !a.inbox.lost.empty()) << "it is not noticed";
  }
}

// The receiver makes no progress: its sender's chunks in flight stay bounded, another peer gets all
// of its chunks, and everything arrives once the receiver goes on.
TEST_P(Fabric, SilentReceiverDelaysOnlyWhatIsSentToIt) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1), c = open_endpoint(2);
  Peer to_b = introduce(a, b), b_to_a = introduce(b, a);
  Peer to_c = introduce(a, c), c_to_a = introduce(c, a);
  Flow warm(5, 1, 1), stalled(scaled(1000) * 100000, 100000, 7), served(64 * 10000, 10000, 8);
  ASSERT_TRUE(warm.open(b, b_to_a));
  drive({&a, &b}, [&] {
    warm.send(a, to_b);
    return warm.over();
  });
  ASSERT_TRUE(stalled.open(b, b_to_a));
  ASSERT_TRUE(served.open(c, c_to_a));
  size_t most_pending = 0;
  drive({&a, &c}, [&] {
    stalled.send(a, to_b);
    served.send(a, to_c);
    most_pending = std::max<size_t>(most_pending, stalled.pending());
    return served.over();
  });
  EXPECT_LE(most_pending, 16u + 24u) << "from memory, and from message buffers";
  if (stalled.chunks() > 500) {
    EXPECT_LT(stalled.sent, stalled.chunks());
  }
  drive({&a, &b}, [&] {
    stalled.send(a, to_b);
    return stalled.over();
  });
}

// The sender gets its memory back even if the receiver dies.
TEST_P(Fabric, SenderGetsItsMemoryBackIfTheReceiverDies) {
  if (std::string(GetParam().provider) == "udp;ofi_rxd") {
    GTEST_SKIP() << "datagrams: no error tells that the peer is gone";
  }
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  std::optional<TestEndpoint> gone = open_endpoint(2);
  Peer to_b = introduce(a, b), to_gone = introduce(a, *gone);
  Peer b_to_a = introduce(b, a), gone_to_a = introduce(*gone, a);
  Flow cut(400 * 50000, 50000, 9), whole(100 * 50000, 50000, 10);
  ASSERT_TRUE(cut.open(*gone, gone_to_a));
  drive({&a, &*gone}, [&] {
    cut.send(a, to_gone);
    return cut.arrived > 3;
  });
  gone.reset();
  ASSERT_TRUE(whole.open(b, b_to_a));
  drive({&a, &b}, [&] {
    cut.send(a, to_gone);
    whole.send(a, to_b);
    return whole.over() && a.inbox.lost.count(to_gone) == 1 && cut.pending() == 0;
  });
  EXPECT_TRUE(
      a.endpoint->write(to_gone, cut.grant, 399, cut.source.data(), 1, cut.batches.pending()));
  EXPECT_EQ(cut.pending(), 0u);
  EXPECT_EQ(a.inbox.lost.count(to_b), 0u);
}

// Regions in the same memory, one after the other and two at once.
TEST_P(Fabric, KeysAreFreshAndEndWithTheirRegion) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  Flow flow(5000, 5000, 1), beside(5000, 5000, 1);
  ASSERT_TRUE(beside.open(b, to_a));
  std::set<uint64_t> keys = {beside.grant.keys[0]};
  for (size_t turn = 1; turn <= 20; ++turn) {
    flow.reset();
    ASSERT_TRUE(flow.open(b, to_a));
    keys.insert(flow.grant.keys[0]);
    wire::Grant second;
    uint32_t region = 0;
    ASSERT_TRUE(
        b.endpoint->open_region(to_a, flow.memory.data() + Flow::kMargin, 5000, &region, &second));
    keys.insert(second.keys[0]);
    EXPECT_EQ(keys.size(), 2 * turn + 1);
    EXPECT_EQ(b.endpoint->counters().registrations, 2 * turn + 1);
    drive({&a, &b}, [&] {
      flow.send(a, to_b);
      return flow.over() && a.endpoint->idle();
    });
    b.endpoint->close_region(region, false);
    flow.close();
  }
  // A write by the last key: the provider refuses it. Not every provider tells the sender.
  std::fill(flow.memory.begin(), flow.memory.end(), Flow::kUntouched);
  flow.sent = 0;
  drive({&a, &b}, [&] {
    flow.send_chunks(a, to_b);
    return flow.sent == 1;
  });
  settle({&a, &b}, kSecond / 5);
  EXPECT_EQ(std::count(flow.memory.begin(), flow.memory.end(), Flow::kUntouched),
            static_cast<std::ptrdiff_t>(flow.memory.size()));
}

TEST_P(Fabric, RefusesARegionWithoutBytes) {
  TestEndpoint a = open_endpoint(0), b = open_endpoint(1);
  Peer to_a = introduce(b, a);
  std::byte byte{};
  uint32_t region = 0;
  wire::Grant grant;
  EXPECT_FALSE(b.endpoint->open_region(to_a, &byte, 0, &region, &grant));
  EXPECT_TRUE(b.endpoint->open_region(to_a, &byte, 1, &region, &grant));
  b.endpoint->close_region(region, false);
  b.endpoint->close_region(region, false);
  b.endpoint->close_region(12345, false);
}

}  // namespace
}  // namespace smddp::ofi
