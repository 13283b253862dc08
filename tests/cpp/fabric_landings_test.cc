// Landings over real libfabric: chunks straight into memory that the receiver opened.
#include <random>
#include <set>

#include "fabric/wire.h"
#include "fabric_nodes.h"

namespace smddp::fabric {
namespace {

INSTANTIATE_TEST_SUITE_P(Providers, Fabric,
                         testing::Values(Way{"tcp", "writes"}, Way{"tcp", "tagged"},
                                         Way{"tcp;ofi_rxm", "writes"}, Way{"tcp;ofi_rxm", "tagged"},
                                         Way{"net", "writes"}, Way{"net", "tagged"},
                                         Way{"udp;ofi_rxd", "writes"},
                                         Way{"udp;ofi_rxd", "tagged"}),
                         name_of_param);

// One transfer: the receiver's landing, and the sender's half of it. Memory around the landing must
// stay as it is.
struct Flow : Inflow {
  static constexpr size_t kMargin = 64;
  static constexpr std::byte kUntouched{0xa5};

  Flow(size_t bytes, size_t chunk_bytes, uint32_t seed)
      : chunk_bytes(chunk_bytes), source(bytes), memory(bytes + 2 * kMargin, kUntouched) {
    std::mt19937 random(seed);
    for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  }
  bool open(Node& receiver, Peer from) {
    return receiver.endpoint->open_landing(from, memory.data() + kMargin, source.size(),
                                           chunk_bytes, this, &grant);
  }
  size_t chunks() const { return (source.size() + chunk_bytes - 1) / chunk_bytes; }
  size_t size_of(size_t index) const {
    return std::min(chunk_bytes, source.size() - index * chunk_bytes);
  }
  // Sends what there is room for; every third chunk out of a message buffer where it fits.
  void send(Node& sender, Peer to) {
    while (sent < chunks()) {
      const std::byte* data = source.data() + sent * chunk_bytes;
      size_t size = size_of(sent);
      if (sent % 3 == 2 && size <= sender.endpoint->max_message()) {
        SendBuffer* buffer = sender.endpoint->acquire(to, false);
        if (buffer == nullptr) return;
        std::memcpy(buffer->data, data, size);
        sender.endpoint->post_chunk(buffer, grant, static_cast<uint32_t>(sent), size);
      } else if (!sender.endpoint->send_chunk(to, grant, static_cast<uint32_t>(sent), data, size,
                                              &pending)) {
        return;
      }
      ++sent;
    }
  }
  void on_chunk(uint32_t index) override {
    EXPECT_LT(index, chunks());
    EXPECT_TRUE(arrived.insert(index).second) << "told twice";
    EXPECT_EQ(std::memcmp(memory.data() + kMargin + index * chunk_bytes,
                          source.data() + index * chunk_bytes, size_of(index)),
              0);
  }
  bool complete() const { return arrived.size() == chunks(); }
  bool over() const { return complete() && sent == chunks() && pending == 0; }
  void check_margins() const {
    for (size_t i = 0; i < kMargin; ++i) {
      ASSERT_EQ(memory[i], kUntouched);
      ASSERT_EQ(memory[memory.size() - 1 - i], kUntouched);
    }
  }

  size_t chunk_bytes, sent = 0;
  std::vector<std::byte> source, memory;
  std::set<uint32_t> arrived;
  uint32_t pending = 0;
  wire::Grant grant = {};
};

TEST_P(Fabric, OneLandingOfManyChunks) {
  Node a = node(0), b = node(1);
  Peer to_b = introduce(a, b), to_a = introduce(b, a);
  Flow flow(scaled(400) * 30011, 30000, 1);
  ASSERT_TRUE(flow.open(b, to_a));
  EXPECT_TRUE(wire::check(flow.grant, flow.source.size()));
  drive({&a, &b}, [&] {
    flow.send(a, to_b);
    return flow.over() && a.endpoint->idle();
  });
  flow.check_margins();
  b.endpoint->close_landing(flow.grant.landing, true);
  EXPECT_EQ(a.endpoint->counters().chunks_sent, flow.chunks());
  EXPECT_EQ(a.endpoint->counters().chunk_bytes_sent, flow.source.size());
  EXPECT_EQ(b.endpoint->counters().chunks_received, flow.chunks());
  EXPECT_EQ(b.endpoint->counters().foreign_chunks, 0u);
}

// Both directions, sizes from one byte to megabytes, several landings at once between three nodes.
TEST_P(Fabric, ManyLandingsAtOnceOfAllSizes) {
  std::mt19937 random(7);
  std::vector<Node> nodes;
  for (uint32_t i = 0; i < 3; ++i) nodes.push_back(node(i));
  std::vector<Node*> all;
  Peer peers[3][3] = {};
  for (Node& from : nodes) {
    all.push_back(&from);
    for (Node& to : nodes) {
      if (&from != &to) peers[from.id][to.id] = introduce(from, to);
    }
  }
  struct Route {
    Node *from, *to;
    std::unique_ptr<Flow> flow;
  };
  for (int round = 0; round < 3; ++round) {
    std::vector<Route> routes;
    for (size_t i = 0; i < scaled(24); ++i) {
      Node& from = nodes[random() % 3];
      Node& to = nodes[(from.id + 1 + random() % 2) % 3];
      size_t bytes = 1 + random() % (size_t{1} << (random() % 21));
      size_t chunk = 1 + random() % (bytes < 5000 ? bytes : bytes / 2);
      if (bytes / chunk > 200) chunk = bytes / 200;
      routes.push_back({&from, &to, std::make_unique<Flow>(bytes, chunk, random())});
      Flow& flow = *routes.back().flow;
      ASSERT_TRUE(flow.open(to, peers[to.id][from.id])) << bytes << " in " << chunk;
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
      route.to->endpoint->close_landing(route.flow->grant.landing, true);
    }
  }
  for (Node& node : nodes) EXPECT_EQ(node.endpoint->counters().foreign_chunks, 0u);
}

TEST_P(Fabric, RefusesLandingsThatCantBe) {
  Node a = node(0), b = node(1);
  Peer to_a = introduce(b, a);
  std::byte byte{};
  wire::Grant grant;
  Flow flow(10, 10, 1);
  EXPECT_FALSE(b.endpoint->open_landing(to_a, &byte, 0, 1, &flow, &grant));
  EXPECT_FALSE(b.endpoint->open_landing(to_a, &byte, 1, 0, &flow, &grant));
  EXPECT_FALSE(b.endpoint->open_landing(to_a, &byte, size_t{1} << 21, 1, &flow, &grant));
  EXPECT_TRUE(flow.open(b, to_a));
  b.endpoint->close_landing(flow.grant.landing, false);
  b.endpoint->close_landing(flow.grant.landing, false);
  b.endpoint->close_landing(12345, true);
}

}  // namespace
}  // namespace smddp::fabric
