// Groups: how they fail, how much they may have in flight, how they are made.
#include <algorithm>
#include <barrier>
#include <numeric>
#include <random>

#include "common/clock.h"
#include "rank_processes.h"
#include "world.h"

namespace smddp {
namespace {

// A call in which rank 1 differs from the others, and what all ranks then say.
struct Disagreement {
  std::vector<std::string> layouts;
  std::function<Status(RankContext&)> call;
  std::function<std::vector<std::string>(int ranks)> said;
};

std::vector<Disagreement> disagreements() {
  auto gather = [](RankContext& c) {
    std::vector<float> in(c.rank == 1 ? 2000 : 1000), out(in.size() * static_cast<size_t>(c.ranks));
    return c.run(gather_of(in, out, c.ranks));
  };
  // Their pieces go through different lanes of an outbox.
  auto gather_or_sum = [](RankContext& c) {
    std::vector<float> part(1000), whole(1000 * static_cast<size_t>(c.ranks));
    return c.rank == 1 ? c.run(scatter_of(whole, part, c.ranks, Dtype::kFloat32, ReduceOp::kSum))
                       : c.run(gather_of(part, whole, c.ranks));
  };
  auto sum = [](size_t size, size_t other, ReduceOp op) {
    return [=](RankContext& c) {
      std::vector<float> data(c.rank == 1 ? other : size, 1.0f);
      return c.run(
          all_reduce_of(data, c.ranks, Dtype::kFloat32, c.rank == 1 ? op : ReduceOp::kSum));
    };
  };
  auto broadcast_of_another_root = [](RankContext& c) {
    std::vector<int64_t> data(1000, c.rank);
    return c.run(broadcast_of(data, (c.rank + 1) % c.ranks, c.ranks));
  };
  auto say = [](std::vector<std::string> words) { return [=](int) { return words; }; };
  auto sizes = [](int ranks) -> std::vector<std::string> {
    return {std::to_string(4000 * ranks), std::to_string(8000 * ranks), "rank 1"};
  };
  return {{{"AA", "AB", "AABB", "AAA"}, gather, sizes},
          {{"AA", "AAA", "AABB"}, gather_or_sum, say({"all_gather", "reduce_scatter", "rank 1"})},
          {{"AA", "AB", "AAB"}, broadcast_of_another_root, say({"broadcast"})},
          {{"AA", "AAA"}, sum(1000, 999, ReduceOp::kSum), say({"rank 1"})},
          {{"AA", "AAA"}, sum(1000, 100'000, ReduceOp::kSum), say({"rank 1"})},
          {{"AA", "AB"}, sum(100, 100, ReduceOp::kMax), say({", sum", ", max"})},
          {{"AA", "AB"}, sum(100'000, 100'000, ReduceOp::kMax), say({", sum", ", max"})}};
}

TEST(Failure, RanksThatCallDifferentOperationsAllSayBothSides) {
  for (const Disagreement& disagreement : disagreements()) {
    for (const std::string& layout : disagreement.layouts) {
      run_world(layout, [&](RankContext& c) {
        Status status = disagreement.call(c);
        ASSERT_FALSE(status.ok());
        for (const std::string& words : disagreement.said(c.ranks))
          EXPECT_TRUE(says(status, words));
        std::vector<float> more(1), all(static_cast<size_t>(c.ranks));
        EXPECT_FALSE(c.run(gather_of(more, all, c.ranks)).ok());  // broken stays broken
      });
    }
  }
}

TEST(Failure, ARankThatStaysAwayIsNamedWithinTheDeadline) {
  const std::string layouts[] = {"AAA", "ABC", "AAB"};
  on_threads(3, [&](int i) {
    run_world(layouts[i],
              [&](RankContext& c) {
                if (c.rank == 2)
                  return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                std::vector<float> in(1000), out(3000);
                Status status = c.run(gather_of(in, out, c.ranks));
                ASSERT_FALSE(status.ok());
                EXPECT_TRUE(says(status, "rank 2"));
              },
              {.timeout_seconds = 0.5});
  });
}

// A shorter limit than the group's first one: of an operation, or that which the group has by now, of a subgroup.
TEST(Failure, AnOperationHasItsOwnLimitAndASubgroupThatOfItsGroup) {
  constexpr uint64_t kLimit = 300'000'000;
  for (auto [layout, has_subgroup] : {std::pair("AA", false), {"AB", false}, {"AA", true}}) {
    std::barrier both(2);
    run_world(layout, [&, has_subgroup = has_subgroup](RankContext& c) {
      std::unique_ptr<Group> subgroup;
      if (has_subgroup) {
        c.group.set_timeout(kLimit);
        subgroup = value_of(c.group.subgroup(c.store, "sub", {1, 0}));
      }
      Group& group = has_subgroup ? *subgroup : c.group;
      if (c.rank == 0) {
        std::vector<float> in(1000), out(2000);
        auto op = gather_of(in, out, 2);
        if (!has_subgroup) op->timeout_ns = kLimit;
        group.submit(op, {}, false);
        EXPECT_TRUE(c.engine.wait(*op, std::chrono::seconds(5)));
        group.abort("took too long");
        c.engine.wait(*op);
        EXPECT_EQ(op->status().code(), Code::kTimeout);
        EXPECT_TRUE(says(op->status(), "timed out after 0.3 s on rank 0 (host-A)"));
      }
      both.arrive_and_wait();
    });
  }
}

// More early data than a peer has credit for, in flows that keep step: a rank that may not send early
// must be told that its peer has started, though the peer's own data has to wait for its turn.
TEST(Fragments, ManyInFlightOfFlowsThatKeepStep) {
  run_world("ABCDE",
            [](RankContext& c) {
              auto ranks = static_cast<size_t>(c.ranks);
              const size_t sizes[] = {48 << 10, 2 << 10, 16 << 10, 160 << 10, 8 << 10, 32 << 10};
              for (size_t turn = 0; turn <= std::size(sizes); ++turn) {  // the last one mixes them
                std::vector<std::vector<char>> in(64), out(64);
                std::vector<std::shared_ptr<Operation>> operations;
                for (size_t i = 0; i < in.size(); ++i) {
                  size_t bytes = sizes[(turn == std::size(sizes) ? i : turn) % std::size(sizes)];
                  in[i].assign(bytes, static_cast<char>(i + static_cast<size_t>(c.rank)));
                  out[i].resize(bytes * ranks);
                  operations.push_back(gather_of(in[i], out[i], c.ranks));
                  c.group.submit(operations.back(), {}, true);
                  if (i % 8 == static_cast<size_t>(c.rank)) c.engine.wait(*operations[i / 2]);
                }
                for (size_t i = 0; i < in.size(); ++i) {
                  c.engine.wait(*operations[i]);
                  ASSERT_TRUE(operations[i]->status().ok()) << operations[i]->status().message();
                  size_t bytes = in[i].size();
                  for (size_t r = 0; r < ranks; ++r)
                    ASSERT_EQ(out[i][r * bytes + bytes / 2], static_cast<char>(i + r));
                }
              }
            },
            {.timeout_seconds = 20});
}

// More of both than the receive budget has room for.
TEST(Fragments, ManyGathersAndSumsInFlightOnHostsOfTwo) {
  run_world("AABB",
            [](RankContext& c) {
              auto ranks = static_cast<size_t>(c.ranks);
              constexpr size_t kShard = 288 << 10;  // in floats
              std::vector<std::vector<float>> in, out;
              std::vector<std::shared_ptr<Operation>> operations;
              for (int i = 0; i < 40; ++i) {
                bool gathers = i % 3 == 0;
                in.emplace_back(kShard * (gathers ? 1 : ranks), static_cast<float>(i + c.rank));
                out.emplace_back(kShard * (gathers ? ranks : 1));
                operations.push_back(gathers ? gather_of(in.back(), out.back(), c.ranks)
                                             : scatter_of(in.back(), out.back(), c.ranks,
                                                          Dtype::kFloat32, ReduceOp::kSum));
                c.group.submit(operations.back(), {}, true);
              }
              for (size_t i = 0; i < operations.size(); ++i) {
                c.engine.wait(*operations[i]);
                ASSERT_TRUE(operations[i]->status().ok()) << operations[i]->status().message();
                auto first = static_cast<float>(i);
                if (i % 3 == 0) {
                  EXPECT_EQ(out[i].back(), first + static_cast<float>(ranks - 1));
                } else {
                  EXPECT_EQ(out[i].front(), 4 * first + 6);  // i + rank over four ranks
                }
              }
            },
            {.timeout_seconds = 30});
}

// A gather, or the one of an AllReduce, waits for a rank of another host. The sums of a later operation go on
// inside this one.
TEST(Fragments, SumsPassGathersThatWait) {
  for (bool all_reduce : {false, true}) {
    std::barrier all(3);
    run_world("AAB", [&](RankContext& c) {
      constexpr size_t kCount = 300'000;
      std::vector<float> in(kCount, 1.0f), out(3 * kCount), whole(300, 1.0f), part(100);
      auto first = all_reduce ? all_reduce_of(in, 3, Dtype::kFloat32, ReduceOp::kSum)
                              : gather_of(in, out, 3);
      auto second = scatter_of(whole, part, 3, Dtype::kFloat32, ReduceOp::kSum);
      if (c.rank == 2) all.arrive_and_wait();
      c.group.submit(first, {}, true);
      c.group.submit(second, {}, true);
      uint64_t taken = 0;
      for (uint64_t until = now_ns() + 10'000'000'000; c.rank < 2 && now_ns() < until;) {
        {
          Engine::Lock lock = c.engine.lock();
          taken = second->taken.slots + second->taken.in_place + second->taken.single_copy;
        }
        if (taken > 0) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (c.rank < 2) {
        EXPECT_GE(taken, part.size() * sizeof(float));
        EXPECT_FALSE(first->complete());
        all.arrive_and_wait();
      }
      for (const auto& op : {first, second}) {
        c.engine.wait(*op);
        EXPECT_TRUE(op->status().ok()) << op->status().message();
      }
      EXPECT_EQ(part, std::vector<float>(100, 3.0f));
      EXPECT_EQ(all_reduce ? in.back() : out.back(), all_reduce ? 3.0f : 1.0f);
    });
  }
}

// Rank 1 makes progress only after everything that rank 0 sends has arrived: the data that finishes the
// first operation, and the abort of the second.
TEST(Failure, APeerThatGivesUpALaterOperationDoesNotBreakEarlierOnes) {
  for (std::string layout : {"AB", "AA"}) {
    std::barrier both(2);
    run_world(layout, [&](RankContext& c) {
      std::vector<float> in(100, 1.0f), out(200), more(100), all(200);
      EXPECT_TRUE(c.run(gather_of(in, out, 2)).ok());  // everything is connected
      auto first = gather_of(in, out, 2), second = gather_of(more, all, 2);
      if (c.rank == 1) c.group.submit(first, {}, false);
      both.arrive_and_wait();
      if (c.rank == 0) {
        EXPECT_TRUE(c.run(first).ok());
        c.group.submit(second, {}, true);
        c.group.abort("asked to");
        c.engine.wait(*second);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until it has arrived
      }
      both.arrive_and_wait();
      if (c.rank == 1) {
        c.engine.wait(*first);
        EXPECT_TRUE(first->status().ok()) << first->status().message();
        Status status = c.run(second);
        EXPECT_TRUE(says(status, "asked to"));
      }
    });
  }
}

// Each turn one rank aborts while large flows are under way. From the error on the memory is the caller's
// again: what it writes there stays. Every other time the flows are coded.
TEST(Failure, NoByteComesAfterTheError) {
  for (std::string layout : {"AB", "AAB", "ABC"}) {
    std::barrier all(static_cast<std::ptrdiff_t>(layout.size()));
    run_world(layout, [&](RankContext& c) {
      auto ranks = static_cast<size_t>(c.ranks);
      std::vector<Rank> everyone(ranks);
      std::iota(everyone.begin(), everyone.end(), 0);
      std::mt19937 random(static_cast<unsigned>(c.rank));
      std::vector<float> in(1 << 19, 1.0f), out(in.size() * ranks);
      unsigned whole = 0;  // ns of one, the second, as the first one connects
      for (int i = 0; i < 2; ++i) {
        const uint64_t began = now_ns();
        ASSERT_TRUE(c.run(gather_of(in, out, c.ranks)).ok());
        whole = static_cast<unsigned>(now_ns() - began);
      }
      int broken = 0;
      for (int turn = 0; turn < 30; ++turn) {
        auto group = c.group.subgroup(c.store, "turn" + std::to_string(turn), everyone);
        ASSERT_TRUE(group.ok()) << group.status().message();
        std::fill(out.begin(), out.end(), 2.0f);
        auto op = gather_of(in, out, c.ranks);
        op->dtype = Dtype::kFloat32;
        all.arrive_and_wait();
        group.value()->submit(op, {.coding = turn % 2 == 0 ? Coding::kOff : Coding::kOn}, true);
        if (turn % c.ranks == c.rank) {
          std::this_thread::sleep_for(std::chrono::nanoseconds(random() % (whole / 2)));
          group.value()->abort("asked to");
        }
        c.engine.wait(*op);
        broken += !op->status().ok();
        std::fill(out.begin(), out.end(), 3.0f);
        for (int i = 0; i < 50; ++i) {
          c.engine.kick(c.engine.lock());
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        size_t kept = static_cast<size_t>(std::count(out.begin(), out.end(), 3.0f));
        EXPECT_EQ(kept, out.size()) << layout << " turn " << turn;
        all.arrive_and_wait();
      }
      EXPECT_GT(broken, 3);
      std::vector<float> result(in.size() * ranks);
      EXPECT_TRUE(c.run(gather_of(in, result, c.ranks)).ok());
      EXPECT_LE(c.process.open_fabric()->counters().regions, 64u);
    });
  }
}

TEST(Failure, ANetworkThatFailsBreaksTheGroupsThatUseItOnce) {
  testing::internal::CaptureStderr();
  run_world("AB",
            [&](RankContext& c) {
              std::vector<int> in(10), out(20);
              ASSERT_TRUE(c.run(gather_of(in, out, 2)).ok());
              if (c.rank == 1) return;
              for (int turn = 0; turn < 2; ++turn) {
                auto op = gather_of(in, out, 2);
                c.group.submit(op, {}, false);
                {
                  Engine::Lock lock = c.engine.lock();
                  static_cast<ShuffledTransport*>(c.process.network().transport())->fails = true;
                }
                ASSERT_TRUE(c.engine.wait(*op, std::chrono::seconds(5)));
                EXPECT_TRUE(says(op->status(), "the network of rank 0 (host-A) failed"));
              }
              EXPECT_FALSE(c.process.fabric().ok());
            },
            {.network = ShuffledTransport::open});
  std::string log = testing::internal::GetCapturedStderr();
  size_t lines = 0;
  for (size_t at = 0; (at = log.find("the network failed", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 1u) << log;
}

// A rank that does not answer, because its engine is held up, delays the error of the others by a moment only. As it may
// still write, what it may write into stays. And an error says that no peer writes into the memory of the group's
// operations, of none of them: one that is submitted to a broken group does not end before the one before it.
TEST(Failure, ARankThatDoesNotAnswerDelaysTheErrorsByAMoment) {
  std::barrier both(2);
  run_world("AB",
            [&](RankContext& c) {
              std::vector<float> in(1 << 19), out(1 << 20), later(1 << 20);
              ASSERT_TRUE(c.run(gather_of(in, out, 2)).ok());
              both.arrive_and_wait();
              if (c.rank == 0) {
                uint64_t began = now_ns();
                auto first = gather_of(in, out, 2);
                c.group.submit(first, {}, true);
                while (c.group.status().ok())
                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
                EXPECT_FALSE(first->complete());
                for (int i = 0; i < 3; ++i) {
                  EXPECT_EQ(c.run(gather_of(in, later, 2)).code(), Code::kTimeout);
                  EXPECT_TRUE(first->complete());
                }
                EXPECT_LT(now_ns() - began, 5'000'000'000u);
                EXPECT_EQ(first->status().code(), Code::kTimeout);
                EXPECT_TRUE(says(first->status(), "rank 1"));
                std::weak_ptr<Operation> kept = std::exchange(first, nullptr);
                EXPECT_FALSE(kept.expired());
                began = now_ns();
                c.engine.shutdown();
                EXPECT_LT(now_ns() - began, 4'000'000'000u);
              }
              Engine::Lock held = c.rank == 1 ? c.engine.lock() : Engine::Lock();
              both.arrive_and_wait();
            },
            {.timeout_seconds = 0.5});
}

TEST(Failure, TheFirstCauseIsHandedOnUntilTheNextGroupIsMade) {
  auto process = std::move(Process::create().value());
  process->broke("rank 2 is gone, after a failure: rank 1 is lost");
  process->broke("later");
  EXPECT_EQ(process->cause(), ", after a failure: rank 1 is lost");
  MemoryStore store;
  EXPECT_TRUE(Group::create(*process, store, 0, 1, {.name = "g"}).ok());
  EXPECT_EQ(process->cause(), "");
}

// Rank 0, whose other group has broken, destroys this one or ends; rank 1 waits for it, or has nothing to do. Over
// libfabric: a rank of another host is asked by its port.
TEST(Failure, ARankThatLeavesTellsTheCauseAndBreaksNoIdleRank) {
  using Case = std::tuple<const char*, bool, bool>;
  for (auto [layout, destroys, idle] :
       {Case("AA", true, false), {"AA", true, true}, {"AB", true, false}, {"AB", false, false}}) {
    MemoryStore store;
    std::barrier both(2);
    on_threads(2, [&, layout = layout, destroys = destroys, idle = idle](int rank) {
      auto process = std::move(Process::create().value());
      std::string host(1, layout[rank]);
      auto group = value_of(Group::create(
          *process, store, rank, 2, {.name = "g", .timeout_ns = 20'000'000'000, .host = host}));
      std::vector<int> in(10), out(20);
      auto gather = [&] {
        auto op = gather_of(in, out, 2);
        group->submit(op, {}, false);
        return process->engine().await(*op);
      };
      EXPECT_TRUE(gather().ok());
      if (rank == 0) {
        {
          Engine::Lock lock = process->engine().lock();
          process->broke("rank 7 is lost");
        }
        destroys ? group.reset() : process->engine().shutdown();
      } else if (!idle) {
        std::string end = destroys ? "has destroyed group 'g'" : "ended";
        EXPECT_TRUE(says(gather(), "rank 0 (A) " + end + ", after a failure: rank 7 is lost"));
      }
      both.arrive_and_wait();
      if (rank == 1 && idle) {
        process->engine().shutdown();
        EXPECT_TRUE(group->status().ok()) << group->status().message();
      }
    });
  }
}

// Rank 0 has done its part of the oldest operation when it gives the group up. Rank 2 still waits for rank 1, which ends
// without a word: the first thing that went wrong is what rank 0 has said.
TEST(Failure, WhatAPeerSaidBeforeAnotherOneIsLostIsTheCause) {
  for (const char* layout : {"ABC", "ABA"}) {
    Processes ranks(layout, [](RankContext& c) -> std::string {
      std::vector<char> mine(100, 'a'), all(300);
      Sizes in = size_of_one(2, 3, 100), out = c.rank == 2 ? equal_sizes(3, 100) : Sizes(3, 0);
      auto op = operation_of(Collective::kGather, 0, mine, in, all, out);
      op->root = 2;
      if (c.rank == 1) {
        await(c.store, "given up");
        usleep(300'000);  // rank 2 has heard of it
        _exit(0);
      }
      c.group.submit(op, {}, false);
      if (c.rank == 0) {
        if (!c.engine.wait(*op, std::chrono::seconds(10))) return "rank 0 is not done";
        c.group.abort("rank 0 gives up", true);
        say(c.store, "given up");
        await(c.store, "told");
        return "";
      }
      if (!c.engine.wait(*op, std::chrono::seconds(15))) return "rank 2 is told nothing";
      say(c.store, "told");
      bool told = op->status().message().find("rank 0 gives up") != std::string::npos;
      return told ? "" : "told: " + op->status().message();
    });
    ranks.expect_ends();
  }
}

// Rank 0 could not make another group. Rank 1, which knows nothing of that one, waits for it in the group of both.
TEST(Failure, ARankThatGivesUpForAGroupThatItCouldNotMakeSaysSo) {
  for (bool destroys : {true, false}) {
    struct : MemoryStore {
      Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>&,
                                                    const std::string&) override {
        return Status(Code::kUnavailable, "the store is gone");
      }
    } broken;
    MemoryStore store;
    std::barrier both(2);
    on_threads(2, [&](int rank) {
      auto process = std::move(Process::create().value());
      Group::Options options{.name = "g", .timeout_ns = 20'000'000'000, .host = "A"};
      auto group = value_of(Group::create(*process, store, rank, 2, options));
      if (rank == 0) {
        EXPECT_FALSE(Group::create(*process, broken, 0, 2, {.name = "h", .host = "A"}).ok());
        destroys ? group.reset() : process->engine().shutdown();
      } else {
        std::vector<int> in(10), out(20);
        auto op = gather_of(in, out, 2);
        group->submit(op, {}, false);
        Status told = process->engine().await(*op);
        EXPECT_TRUE(says(told, destroys ? "rank 0 (A) has destroyed group 'g'"
                                        : "rank 0 (A) has ended its program"));
        EXPECT_TRUE(says(told, ", after a failure: "));
        EXPECT_TRUE(says(told, "the store is gone"));
      }
      both.arrive_and_wait();
    });
  }
}

// One rank of those that break a group and make the next one, in one process.
class HealingRank {
 public:
  HealingRank(std::vector<MemoryStore>& stores, std::barrier<>& all, int rank, int ranks)
      : stores_(stores), all_(all), rank_(rank), ranks_(ranks) {}

  std::unique_ptr<Group> make() {
    std::string host(1, static_cast<char>('A' + rank_));
    auto group =
        Group::create(*process_, stores_[made_++], rank_, ranks_, {.name = "g", .host = host});
    EXPECT_TRUE(group.ok()) << group.status().message();
    return std::move(group.value());
  }
  Status gather(Group& group) {
    std::vector<int> in(1 << 18, rank_), out(in.size() * static_cast<size_t>(ranks_));
    auto op = gather_of(in, out, ranks_);
    group.submit(op, {}, false);
    process_->engine().wait(*op);
    for (int r = 0; r < ranks_ && op->status().ok(); ++r) {
      auto begin = out.begin() + static_cast<std::ptrdiff_t>(in.size()) * r;
      EXPECT_EQ(std::count(begin, begin + (1 << 18), r), 1 << 18);
    }
    return op->status();
  }
  // Rank 0 aborts an operation that the others have begun.
  void break_group(Group& group) {
    if (rank_ == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      group.abort("asked to", true);
    } else {
      EXPECT_FALSE(gather(group).ok());
    }
    all_.arrive_and_wait();
  }
  // Of the next group, which works: another one than `before`, or the same.
  void expect_endpoint(const std::vector<uint8_t>& before, bool is_new) {
    auto next = make();
    EXPECT_EQ(address() != before, is_new);
    EXPECT_TRUE(gather(*next).ok());
  }
  std::vector<uint8_t> address() { return process_->open_fabric()->facts().address; }

 private:
  std::vector<MemoryStore>& stores_;
  std::barrier<>& all_;
  int rank_, ranks_;
  size_t made_ = 0;
  std::unique_ptr<Process> process_ = std::move(Process::create(network_of_tests()).value());
};

void heal_together(int ranks, const std::function<void(HealingRank&)>& body) {
  std::vector<MemoryStore> stores(8);
  std::barrier<> all(ranks);
  on_threads(ranks, [&](int r) {
    HealingRank rank(stores, all, r, ranks);
    body(rank);
    all.arrive_and_wait();
  });
}

TEST(Healing, AGroupAfterABrokenOneHasANewEndpoint) {
  for (int ranks : {2, 3}) {
    for (bool keeps_broken : {false, true}) {
      heal_together(ranks, [&](HealingRank& rank) {
        std::vector<std::unique_ptr<Group>> broken;
        for (int turn = 0; turn < 4; ++turn) {
          auto group = rank.make();
          EXPECT_TRUE(rank.gather(*group).ok());
          std::vector<uint8_t> before = rank.address();
          rank.break_group(*group);
          if (keeps_broken) broken.push_back(std::move(group));
          group.reset();
          rank.expect_endpoint(before, true);
          if (keeps_broken) EXPECT_FALSE(rank.gather(*broken.back()).ok());
        }
      });
    }
  }
}

TEST(Healing, AGroupAfterOneThatHasEndedHasANewEndpoint) {
  heal_together(2, [&](HealingRank& rank) {
    auto group = rank.make();
    EXPECT_TRUE(rank.gather(*group).ok());
    std::vector<uint8_t> before = rank.address();
    group.reset();
    rank.expect_endpoint(before, true);
  });
}

TEST(Healing, TheEndpointStaysWhileAnotherGroupUsesIt) {
  heal_together(3, [&](HealingRank& rank) {
    auto works = rank.make();
    auto group = rank.make();
    EXPECT_TRUE(rank.gather(*group).ok());
    std::vector<uint8_t> before = rank.address();
    rank.break_group(*group);
    rank.expect_endpoint(before, false);
    EXPECT_TRUE(rank.gather(*works).ok());
  });
}

}  // namespace
}  // namespace smddp
