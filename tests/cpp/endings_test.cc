// What a rank has sent arrives, also when the rank destroys its group and ends right afterwards, while the others
// compute: between hosts, over each version of libfabric.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "common/clock.h"
#include "rank_processes.h"
#include "tcp_connections.h"

namespace smddp {
namespace {

constexpr int kBroadcasts = 15;  // of 16 KiB: less than the credit of a peer
using Data = std::vector<int>;

Status meet(RankContext& c) {
  Data in(1), out(static_cast<size_t>(c.ranks));
  return c.run(gather_of(in, out, c.ranks));
}

// What was wrong, or "".
std::string broadcast_all(RankContext& c) {
  for (int i = 0; i < kBroadcasts; ++i) {
    Data data(4096, c.rank == 0 ? i + 1 : 0);
    Status status = c.run(broadcast_of(data, 0, c.ranks));
    if (!status) return "broadcast " + std::to_string(i) + ": " + status.message();
    if (data != Data(4096, i + 1)) return "broadcast " + std::to_string(i) + " is wrong";
  }
  return "";
}

// No thread takes what arrives meanwhile.
void compute(RankContext& c) {
  Engine::Lock lock = c.engine.lock();
  usleep(700'000);
}

std::string root_and_late_ranks(RankContext& c) {
  if (Status met = meet(c); !met) return met.message();
  if (c.rank > 0) compute(c);
  return broadcast_all(c);
}

TEST(Endings, TheRootMayEndBeforeTheOthersReceive) {
  Processes ranks("ABC", root_and_late_ranks);
  ranks.expect_ends();
}

// As a program that ends without destroying its group.
TEST(Endings, TheRootsProcessMayEndWithItsGroup) {
  Processes ranks("AB", [](RankContext& c) {
    std::string wrong = root_and_late_ranks(c);
    if (c.rank == 0) c.engine.shutdown();
    return wrong;
  });
  ranks.expect_ends();
}

// Rank 0 has sent to rank 1, which makes no call, or is stopped.
TEST(Endings, ARankThatEndsWaitsForNoCallOfAnother) {
  for (bool stops : {false, true}) {
    Processes ranks("AB", [stops](RankContext& c) -> std::string {
      if (Status met = meet(c); !met) return met.message();
      if (c.rank == 1) {
        if (stops) sleep(1);  // until it has answered: who was never reached is not called silent
        say(c.store, "computes");
        if (stops) raise(SIGSTOP);
        return await(c.store, "ended") ? "" : "rank 0 does not end";
      }
      await(c.store, "computes");
      usleep(300'000);
      const uint64_t began = now_ns();
      c.engine.shutdown();
      const bool late = now_ns() - began > 4'000'000'000;
      say(c.store, "ended");
      return late ? "its end waits for the other rank" : "";
    });
    ranks.expect_end(0);
    if (!stops) ranks.expect_end(1);
  }
}

TEST(Endings, AForkedChildEndsNothingOfItsParent) {
  Processes ranks("AB", [](RankContext& c) -> std::string {
    if (Status met = meet(c); !met) return met.message();
    if (c.rank == 0) {
      pid_t child = fork();
      if (child == 0) {
        alarm(4);
        std::unique_ptr<Group>(&c.group).reset();
        c.engine.shutdown();
        _exit(0);
      }
      int status = 0;
      waitpid(child, &status, 0);
      if (status != 0) return "the child did not end";
    }
    return meet(c).message();
  });
  ranks.expect_ends();
}

// As a firewall that resets what has been idle for long: the connections of one rank, or of both.
TEST(Endings, AnIdleConnectionThatEndsLosesNoPeer) {
  for (int cutters : {1, 2}) {
    Processes ranks("AB", [cutters](RankContext& c) -> std::string {
      for (int turn = 0; turn < 5; ++turn) {
        if (Status met = meet(c); !met)
          return "turn " + std::to_string(turn) + ": " + met.message();
        const std::string idle = "idle " + std::to_string(turn) + "/", cut = "cut " + idle;
        usleep(100'000);
        say(c.store, idle + std::to_string(c.rank));
        await(c.store, idle + std::to_string(1 - c.rank));
        if (c.rank < cutters) for_each_connection([](int fd) { shutdown(fd, SHUT_RDWR); });
        say(c.store, cut + std::to_string(c.rank));
        await(c.store, cut + std::to_string(1 - c.rank));
        usleep(100'000);
      }
      return "";
    });
    ranks.expect_ends();
  }
}

// Rank 1 is stopped as it sends, and goes on to send once rank 0 has given the operation and its memory up.
TEST(Endings, WhatIsSentToAGroupThatFailedCostsNoOtherGroup) {
  Processes ranks("AB", [](RankContext& c) -> std::string {
    if (Status met = meet(c); !met) return met.message();
    auto other = c.group.subgroup(c.store, "other", {0, 1});
    if (!other) return other.status().message();
    Data in(8 << 20), out(16 << 20);
    auto op = gather_of(in, out, c.ranks);
    op->timeout_ns = 300'000'000;
    other.value()->submit(op, {}, true);
    if (c.rank == 1) {
      usleep(3000);
      Engine::Lock lock = c.engine.lock();
      usleep(4'000'000);
    }
    c.engine.wait(*op);
    if (op->status()) return "rank 1 was not stopped soon enough";
    return meet(c).message();
  });
  ranks.expect_ends();
}

// libfabric replaces a connection that breaks: the message behind the lost writes comes all the same.
TEST(Endings, WritesThatABrokenConnectionLostAreMissed) {
  ShuffledNetwork::only().loses_writes = true;
  auto gathers = [](RankContext& c) {
    std::vector<int> in(1 << 17), out(2 << 17);
    Status status = c.run(gather_of(in, out, c.ranks));
    EXPECT_NE(status.message().find("the connection to it broke"), std::string::npos)
        << status.message();
  };
  run_world("AB", gathers, {.network = ShuffledTransport::open});
  ShuffledNetwork::only().loses_writes = false;
}

// A firewall that forgets idle connections sees a word on each once a minute.
TEST(Endings, AnIdleConnectionIsKeptAlive) {
  Processes ranks("AB", [](RankContext& c) -> std::string {
    if (Status met = meet(c); !met) return met.message();
    uint32_t kept = 0;
    for_each_connection([&](int fd) {
      int on = 0, idle = 0;
      socklen_t size = sizeof on;
      getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, &size);
      getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &size);
      kept += on != 0 && idle <= 60 ? 1 : 0;
    });
    std::vector<uint32_t> in{kept}, out(2);
    if (Status gathered = c.run(gather_of(in, out, c.ranks)); !gathered) return gathered.message();
    return out[0] + out[1] > 0 ? "" : "neither side of a connection keeps it alive";
  });
  ranks.expect_ends();
}

}  // namespace
}  // namespace smddp
