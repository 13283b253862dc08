// Cards that ranks exchange, and what a rank makes of bytes that are none of its group's.
#include <random>

#include "world.h"

namespace smddp {
namespace {

Card a_card() {
  Card card;
  card.host = "identity";
  card.host_name = "name";
  card.key[3] = 7;
  card.token = 0x1234567890abcdef;
  card.pid = 42;
  card.presence_fd = 5;
  card.doorbell_fd = 6;
  card.outbox_fd = 7;
  return card;
}

TEST(Card, SurvivesTheRoundTrip) {
  auto read = decode(encode(a_card()));
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read.value().host, "identity");
  EXPECT_EQ(read.value().host_name, "name");
  EXPECT_EQ(read.value().key, a_card().key);
  EXPECT_EQ(read.value().token, a_card().token);
  EXPECT_EQ(read.value().pid, 42);
  EXPECT_EQ(read.value().presence_fd, 5);
  EXPECT_EQ(read.value().doorbell_fd, 6);
  EXPECT_EQ(read.value().outbox_fd, 7);
}

TEST(Card, AnyTruncationIsAnErrorAndNoRead) {
  auto whole = encode(a_card());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(decode({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}).ok());
  }
}

TEST(Card, AnotherVersionIsNamedAsSuch) {
  auto blob = encode(a_card());
  ++blob[0];
  auto read = decode(blob);
  ASSERT_FALSE(read.ok());
  EXPECT_NE(read.status().message().find("version"), std::string::npos);
}

TEST(Card, RandomBytesAreHarmless) {
  std::mt19937 random(3);
  auto head = encode(a_card());
  for (int i = 0; i < 20000; ++i) {
    std::vector<uint8_t> blob(random() % 200);
    for (auto& byte : blob) byte = static_cast<uint8_t>(random());
    for (size_t b = 0; b < std::min<size_t>(4, blob.size()); ++b)
      blob[b] = head[b];  // past the version
    (void)decode(blob);
  }
}

class NoSink : public fabric::Sink {
  void on_message(const std::byte*, size_t) override {}
  void on_peer_lost(fabric::Peer, const Status&) override {}
};

// A stranger who knows the address but not the key: garbage, well-formed headers of no group, and an
// abort. The group goes on, and nothing of it is taken.
TEST(Strangers, MessagesWithoutTheKeyChangeNothing) {
  run_world("AB", [](RankContext& c) {
    std::vector<int> in(100, c.rank), out(200);
    ASSERT_TRUE(c.run(gather_of(in, out, 2)).ok());
    if (c.rank == 0) {
      auto stranger = fabric::Endpoint::open({"", "", "lo"});
      ASSERT_TRUE(stranger.ok());
      auto peer = stranger.value()->add_peer(c.engine.open_fabric()->address());
      ASSERT_TRUE(peer.ok());
      NoSink sink;
      std::mt19937 random(5);
      for (int i = 0; i < 60; ++i) {
        fabric::SendBuffer* buffer = nullptr;
        while ((buffer = stranger.value()->acquire(peer.value(), false)) == nullptr) {
          (void)stranger.value()->progress(sink);
          c.engine.kick(c.engine.lock(), nullptr);
        }
        size_t size = sizeof(wire::Header) + random() % 1000;
        for (size_t b = 0; b < size; ++b) buffer->data[b] = static_cast<std::byte>(random());
        if (i % 3 != 0) {
          wire::Header header{};
          header.magic = wire::kMagic;
          header.type = i % 3 == 1 ? wire::Type::kData : wire::Type::kAbort;
          header.bytes = size - sizeof header;
          header.seq = static_cast<uint64_t>(i);
          std::memcpy(buffer->data, &header, sizeof header);
        }
        stranger.value()->post(buffer, size);
      }
      for (int turn = 0; turn < 2000 && !stranger.value()->idle(); ++turn) {
        (void)stranger.value()->progress(sink);
        c.engine.kick(c.engine.lock(), nullptr);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_TRUE(stranger.value()->idle());
    }
    for (int i = 0; i < 20; ++i) {
      std::fill(in.begin(), in.end(), c.rank + i);
      Status status = c.run(gather_of(in, out, 2));
      ASSERT_TRUE(status.ok()) << status.message();
      for (size_t j = 0; j < out.size(); ++j) ASSERT_EQ(out[j], static_cast<int>(j / 100) + i);
    }
    if (c.rank == 0) EXPECT_GT(c.engine.foreign_messages(), 0u);
  });
}

}  // namespace
}  // namespace smddp
