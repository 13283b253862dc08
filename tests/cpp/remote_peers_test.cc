// READYs and aborts to many peers of which some take none, and the end of a process with many of them.
#include "flows/remote_peers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "flows/fragment_flows.h"
#include "world.h"

namespace smddp {
namespace {

using transport::Peer;
using transport::Transport;

// Counts messages by the rank and the type that their headers name.
struct Heard : transport::Sink {
  void on_message(const std::byte* data, size_t size) override {
    ASSERT_GE(size, sizeof(wire::Header));
    wire::Header header;
    std::memcpy(&header, data, sizeof header);
    ++(header.type == wire::Type::kReady ? readies : others);
    EXPECT_GE(header.seq, last) << "READYs to one peer are in order";
    if (header.type == wire::Type::kReady) last = header.seq;
  }
  void on_peer_lost(Peer, const Status&) override {}
  int readies = 0, others = 0;
  uint64_t last = 0;
};

// A transport that takes nothing, since nothing polls it, holds its share of the buffers.
struct StuckAndLive {
  explicit StuckAndLive(bool stuck_first) {
    ShuffledNetwork::only().orderly = true;
    for (auto* transport : {&own, &stuck, &live})
      *transport = std::move(ShuffledTransport::open().value());
    remote.emplace(JobKey{}, siphash::Key{}, 0, 3, own.get(), size_t{1} << 20);
    remote->add(1, own->add_peer((stuck_first ? stuck : live)->facts().address).value());
    remote->add(2, own->add_peer((stuck_first ? live : stuck)->facts().address).value());
  }
  ~StuckAndLive() { ShuffledNetwork::only().orderly = false; }
  // Drives all but the stuck one for a while, or until done() is true.
  template <class Done>
  void drive(Done&& done) {
    for (int turn = 0; turn < 3000 && !done(); ++turn) {
      (void)own->poll(ignored);
      (void)live->poll(heard);
      if (turn % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // Of a fragment between three hosts; `first`: it covers the start of the operation's blocks.
  FragmentFlows flows(uint64_t fragment, bool first) {
    return FragmentFlows(members, *remote, turns,
                         {{},
                          fragment,
                          pattern::Pattern::kDirect,
                          16 << 10,
                          first,
                          false,
                          {},
                          &tallies,
                          waiters,
                          {Coding::kOff, Dtype::kBytes, 1, coding},
                          sent});
  }
  std::unique_ptr<Transport> own, stuck, live;
  std::optional<RemotePeers> remote;
  Members members{0, Topology({"A", "B", "C"}), "g", {"A", "B", "C"}, {0, 1, 2}};
  RailTurns turns;
  PeerTallies tallies{3};
  CodingChoice coding;
  SentBytes sent;
  std::atomic<uint64_t> waiters{0};
  Heard ignored, heard;
};

TEST(RemotePeers, APeerThatTakesNoReadyHoldsUpNoOther) {
  StuckAndLive world(true);
  RemotePeers& remote = *world.remote;
  for (uint64_t seq = 0; seq < 200; ++seq) remote.send_ready(1, seq, {}, 0, nullptr);
  EXPECT_TRUE(remote.has_unsent());
  for (uint64_t seq = 0; seq < 50; ++seq) remote.send_ready(2, seq, {}, 0, nullptr);
  world.drive([&] {
    remote.flush_ready();
    return world.heard.readies == 50;
  });
  EXPECT_EQ(world.heard.readies, 50);
  EXPECT_TRUE(remote.has_unsent()) << "the other peer's";
}

// 65,536 messages of the longest kind would be gigabytes.
TEST(RemotePeers, WhatIsKeptForLaterIsShortButForDataWithinTheCredit) {
  RemotePeers remote(JobKey{}, siphash::Key{}, 0, 2, nullptr, size_t{1} << 20);
  remote.add(1, 0);
  std::vector<std::byte> payload(100'000);
  wire::Header header{};
  header.source = 1;
  auto keeps = [&](wire::Type type, size_t bytes) {
    header.type = type;
    header.bytes = static_cast<uint32_t>(bytes);
    return remote.keep_early(header, payload.data());
  };
  EXPECT_TRUE(keeps(wire::Type::kReady, sizeof(wire::Grant)));
  EXPECT_FALSE(keeps(wire::Type::kReady, sizeof(wire::Grant) + 1));
  EXPECT_FALSE(keeps(wire::Type::kWritten, payload.size()));
  EXPECT_TRUE(keeps(wire::Type::kData, payload.size()));
}

// Rank 0 of three, which are not there.
struct Alone {
  Alone() {
    remote.add(1, 0);
    remote.add(2, 1);
  }
  static constexpr siphash::Key kKey{1, 2};
  RemotePeers remote{JobKey{}, kKey, 0, 3, nullptr, size_t{1} << 20};
};

TEST(RemotePeers, OnlyMessagesOfARankToThisOneAreTakenAndOnlyOnce) {
  Alone alone;
  auto header = [](uint32_t source, uint32_t target, uint64_t counter,
                   siphash::Key key = Alone::kKey) {
    wire::Header made{};
    made.type = wire::Type::kReady;
    made.source = source;
    made.target = target;
    made.counter = counter;
    made.mac = wire::mac_of(key, made, nullptr);
    return made;
  };
  EXPECT_TRUE(alone.remote.accept(header(1, 0, 5), nullptr));
  EXPECT_TRUE(alone.remote.accept(header(1, 0, 3), nullptr)) << "in any order";
  EXPECT_FALSE(alone.remote.accept(header(1, 0, 5), nullptr)) << "again";
  EXPECT_TRUE(alone.remote.accept(header(2, 0, 5), nullptr)) << "of another rank";
  EXPECT_FALSE(alone.remote.accept(header(1, 2, 6), nullptr)) << "to another rank";
  EXPECT_FALSE(alone.remote.accept(header(1, 0, 7, {1, 3}), nullptr)) << "with another key";
  EXPECT_FALSE(alone.remote.accept(header(0, 0, 8), nullptr)) << "of this rank";
  EXPECT_FALSE(alone.remote.accept(header(3, 0, 9), nullptr)) << "of no rank";
}

TEST(RemotePeers, CreditIsTakenInTheOrderOfFragmentsUntilTheyHaveStarted) {
  Alone alone;
  RemotePeers& remote = alone.remote;
  size_t credit = remote.credit();
  EXPECT_FALSE(remote.may_send_early(1, 0, 1)) << "it may still be making the group";
  remote.has_started(1, 0);
  EXPECT_TRUE(remote.may_send_early(1, 0, 2 * credit)) << "it has started that one";
  EXPECT_TRUE(remote.may_send_early(1, 1, credit - 1));
  EXPECT_FALSE(remote.may_send_early(1, 2, 2));
  EXPECT_FALSE(remote.may_send_early(1, 3, 1)) << "before the one that was refused";
  for (uint64_t seq = 1; seq < 100; ++seq) {
    remote.has_started(1, seq);
    EXPECT_TRUE(remote.may_send_early(1, seq + 1, credit)) << seq;
  }
  remote.has_started(1, 100);
  uint64_t empty = 101;
  while (empty < 100'000 && remote.may_send_early(1, empty, 0)) ++empty;
  EXPECT_LT(empty, 10'000u) << "each of them takes memory of the peer";
}

TEST(RemotePeers, AReceiverOfMessagesTellsTheirSenderBeforeTheCreditEnds) {
  StuckAndLive world(true);
  RemotePeers &receiver = *world.remote, sender(JobKey{}, siphash::Key{}, 2, 3, nullptr, 1 << 20);
  sender.add(0, 0);
  std::mt19937 random(1);
  std::vector<size_t> sizes;
  uint64_t started = 0;
  int readies = 0;
  for (uint64_t seq = 0; seq < 2000; ++seq) {
    sizes.push_back(random() % (random() % 4 == 0 ? 64 << 10 : 64));
    while (!sender.may_send_early(0, seq, sizes.back())) {
      ASSERT_LE(started, seq) << "the sender would wait for ever";
      if (receiver.count_message(2, sizes[started])) {
        receiver.send_ready(2, started, {}, 0, nullptr);
        sender.has_started(0, started);
        ++readies;
      }
      ++started;
    }
  }
  EXPECT_LT(readies, 300);
}

// Of 512 hosts with 8 ranks each, 511 ranks may send to a rank. With the credit divided by all 4,096 ranks
// no flow of more than 2 KiB would go out before the first READY.
TEST(RemotePeers, CreditIsDividedAmongTheRanksThatMaySend) {
  RemotePeers remote(JobKey{}, siphash::Key{}, 0, 4096, nullptr, size_t{1} << 20, 512);
  EXPECT_EQ(remote.credit(), size_t{16} << 10);
  RemotePeers any(JobKey{}, siphash::Key{}, 0, 4096, nullptr, size_t{1} << 20);
  EXPECT_EQ(any.credit(), size_t{2} << 10);
}

TEST(RemotePeers, WhatIsKeptIsNoLongerKeptWhenItsFragmentStarts) {
  Alone alone;
  std::vector<std::byte> payload(alone.remote.credit());
  wire::Header header{};
  header.type = wire::Type::kData;
  header.source = 1;
  header.bytes = static_cast<uint32_t>(payload.size());
  for (header.seq = 0; header.seq < 10; ++header.seq) {
    EXPECT_TRUE(alone.remote.keep_early(header, payload.data()));
    EXPECT_FALSE(alone.remote.keep_early(header, payload.data())) << "beyond the credit";
    int taken = 0;
    alone.remote.take_early(header.seq, [&](const wire::Header&, const std::byte*) { ++taken; });
    EXPECT_EQ(taken, 1);
  }
}

TEST(RemotePeers, APeerThatIsLostWritesNoMore) {
  Alone alone;
  alone.remote.on_peer_lost(1);
  EXPECT_FALSE(alone.remote.writes_closed(1));
  EXPECT_TRUE(alone.remote.writes_closed(2));
}

// Rank 2 is lost, and rank 0 has sent to rank 1.
TEST(RemotePeers, ARankMayLeaveOnceItsPeersHaveTakenAllThatItHasSent) {
  constexpr uint64_t kSecond = 1'000'000'000;
  StuckAndLive world(false);
  RemotePeers& remote = *world.remote;
  EXPECT_TRUE(remote.all_taken(1)) << "it has sent nothing";
  for (Rank peer : {1, 2}) remote.send_ready(peer, 0, {}, 0, nullptr);
  remote.on_peer_lost(remote.peer(2));
  for (double seconds : {1.0, 1.1, 2.0})
    EXPECT_FALSE(remote.all_taken(static_cast<uint64_t>(seconds * kSecond)));
  world.drive([&] { return world.heard.others == 3; });
  EXPECT_EQ(world.heard.others, 2) << "questions";
  remote.heard_taken(1);
  EXPECT_TRUE(remote.all_taken(2 * kSecond));
}

TEST(RemotePeers, ARankThatLeavesIsAnsweredOnceAllThatItHasSentIsHere) {
  StuckAndLive world(false);
  RemotePeers& remote = *world.remote;
  auto accept = [&](uint64_t counter) {
    wire::Header header{};
    header.type = wire::Type::kLeaving;
    header.source = 1;
    header.counter = counter;
    header.mac = wire::mac_of({}, header, nullptr);
    EXPECT_TRUE(remote.accept(header, nullptr));
    return header;
  };
  remote.send_ready(1, 0, {}, 0, nullptr);
  remote.heard_leaving(accept(1));
  EXPECT_TRUE(remote.all_taken(1)) << "it reads no more";
  accept(0);
  remote.heard_leaving(accept(2));
  world.drive([&] { return world.heard.others == 2; });
  EXPECT_EQ(world.heard.others, 1) << "answers";
}

TEST(RemotePeers, APeerThatTakesNoAbortHoldsUpNoOther) {
  for (bool stuck_first : {false, true}) {
    StuckAndLive world(stuck_first);
    RemotePeers& remote = *world.remote;
    Rank stuck = stuck_first ? 1 : 2;
    for (uint64_t seq = 0; seq < 200; ++seq) remote.send_ready(stuck, seq, {}, 0, nullptr);
    remote.send_aborts(0, "why");
    world.drive([&] {
      remote.flush_aborts();
      return world.heard.others == 1;
    });
    EXPECT_EQ(world.heard.others, 1);
    EXPECT_TRUE(remote.has_unsent());
  }
}

// Rank 0 has credit from rank 1, and has sent it nothing: rank 1 may not know this group yet. Its flow to rank
// 1 may have to wait for the one from there, so rank 1 has to get a READY.
TEST(FragmentFlows, ARankThatMayNotKnowTheGroupGetsAReady) {
  StuckAndLive world(false);
  RemotePeers& remote = *world.remote;
  FragmentFlows flows = world.flows(0, true);
  for (Rank peer : {1, 2}) {
    remote.has_started(peer, 0);
    pattern::Flow flow{peer, {0}, peer};
    ShardRun in, out;
    in.add(peer, 16 << 10);
    out.add(0, 16 << 10);
    ASSERT_NE(flows.add_receive(flow, std::move(in)), nullptr);
    ASSERT_NE(flows.add_send(flow, std::move(out)), nullptr);
  }
  flows.open(true);
  EXPECT_TRUE(remote.has_greeted(1));
  EXPECT_TRUE(remote.has_greeted(2));
  EXPECT_FALSE(flows.has_sent_all(1));
  flows.close();
}

// Later fragments can't end before the oldest one: if they have filled the budget, it still moves.
TEST(FragmentFlows, TheOldestFragmentMayReceiveAChunkThoughTheBudgetIsFull) {
  StuckAndLive world(false);
  RemotePeers& remote = *world.remote;
  FragmentFlows oldest = world.flows(0, false), later = world.flows(1, false);
  remote.receive_budget().open(remote.receive_budget().bytes());
  auto allowed = [](FragmentFlows& flows) {
    ShardRun run;
    run.add(1, 1 << 20);
    ReceiveFlow* receive = flows.add_receive({1, {0}, 1}, std::move(run));
    flows.open(true);
    return receive->allowed;
  };
  EXPECT_EQ(allowed(oldest), 16u << 10) << "a chunk";
  EXPECT_EQ(allowed(later), 0u);
  later.close();
  oldest.close();
}

// More peers than the endpoint has buffers for: all are told, and later calls find no endpoint that is gone.
TEST(RemotePeers, AProcessThatEndsTellsAllOfMoreThanItHasBuffersFor) {
  constexpr size_t kHosts = 70;
  std::vector<std::string> hosts;
  for (size_t h = 0; h < kHosts; ++h) hosts.push_back("host-" + std::to_string(h));
  std::atomic<size_t> told{0};
  run_world(hosts,
            [&](RankContext& c) {
              std::vector<int> in(10, c.rank), out(in.size() * kHosts);
              ASSERT_TRUE(c.run(gather_of(in, out, c.ranks)).ok());
              if (c.rank == 1) {  // makes no call, so that those of all others don't end
                while (told < kHosts - 1)
                  std::this_thread::sleep_for(std::chrono::milliseconds(10));
                return;
              }
              auto op = gather_of(in, out, c.ranks);
              c.group.submit(op, {}, c.rank == 0);
              if (c.rank == 0) {
                std::this_thread::sleep_for(std::chrono::milliseconds(500));
                c.engine.shutdown();
                for (int turn = 0; turn < 3; ++turn) {
                  auto later = gather_of(in, out, c.ranks);
                  c.group.submit(later, {}, false);
                  EXPECT_TRUE(later->complete());
                  EXPECT_FALSE(later->status().ok());
                }
              } else {
                EXPECT_TRUE(c.engine.wait(*op, std::chrono::seconds(20))) << c.rank;
                EXPECT_TRUE(says(op->status(), "rank 0 (host-0) ended with operations in flight"));
              }
              ++told;
            },
            {.timeout_seconds = 60, .several_hosts = true});
}

}  // namespace
}  // namespace smddp
