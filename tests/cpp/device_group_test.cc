// Collectives on device memory, on the device that threads simulate: flags, order, freed memory, failures.
#include "gpu/device_group.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>

#include "child.h"
#include "device_job.h"

namespace smddp {
namespace {

using device::HostDevice;
using intranode::Imports;

class DeviceGroupOf : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DeviceGroupOf, testing::Values(1, 2, 3, 5));

TEST(DeviceGroup, MemoryThatCannotBeSharedFailsOnlyThatCallOnAllRanks) {
  run_jobs("aaa", [](DeviceRank& r, Job& job) {
    float *in = r.floats(32), *out = r.floats(96);
    std::vector<float> private_memory(32);
    Status s = r.run(job.gather(r.context.rank == 1 ? private_memory.data() : in, out, 32));
    ASSERT_FALSE(s.ok());
    EXPECT_TRUE(says(s, "rank 1"));
    in[0] = 5;
    EXPECT_TRUE(r.run(job.gather(in, out, 32)).ok());
    EXPECT_EQ(out[64], 5);
  });
}

TEST(DeviceGroup, RunningOutOfDescriptorsFailsOnlyThatCallAndFreedMemoryMakesRoom) {
  constexpr size_t kPieces = 3;
  run_jobs("aa", [](DeviceRank& r, Job& job) {
    if (r.context.rank == 1) r.gpu.set_most_exported(kPieces);
    float* out = r.floats(64);
    std::vector<float*> pieces;
    for (size_t i = 0; i <= kPieces; ++i) pieces.push_back(r.floats(32));
    for (size_t i = 0; i < kPieces; ++i) ASSERT_TRUE(r.run(job.gather(pieces[i], out, 32)).ok());
    Status s = r.run(job.gather(pieces[kPieces], out, 32));
    ASSERT_FALSE(s.ok());
    EXPECT_TRUE(says(s, "rank 1"));
    EXPECT_TRUE(says(s, "Too many open files"));
    EXPECT_EQ(r.gpu.recall(pieces[0], 128), 0u);
    r.gpu.free(pieces[0]);
    pieces[kPieces][31] = 5;
    ASSERT_TRUE(r.run(job.gather(pieces[kPieces], out, 32)).ok());
    EXPECT_EQ(out[63], 5);
  });
}

// The same few buffers in every turn, and only streams order what is done with them: the host waits once, at
// the end. Each rank's device has its own speed.
TEST_P(DeviceGroupOf, StreamsOrderCopiesAndSumsThatTakeTime) {
  constexpr size_t kCount = 1003;
  constexpr int kTurns = 6;
  run_jobs(std::string(static_cast<size_t>(GetParam()), 'a'), [&](DeviceRank& r, Job& job) {
    r.gpu.set_duration(std::chrono::microseconds(50 + 400 * (r.context.rank % 2)));
    auto ranks = static_cast<size_t>(r.context.ranks);
    float *in = r.floats(kCount), *gathered = r.floats(kCount * ranks);
    float *whole = r.floats(kCount * ranks), *part = r.floats(kCount), *all = r.floats(kCount);
    std::vector<std::vector<float>> given, got;
    std::vector<std::shared_ptr<DeviceOperation>> ops;
    auto copy = [&](float* to, const float* from, size_t count) {
      ASSERT_TRUE(r.gpu.copy(r.user, to, from, count * 4).ok());
    };
    auto run = [&](std::shared_ptr<DeviceOperation> op) {
      ASSERT_TRUE(r.group->submit(op, r.user).ok());
      ASSERT_TRUE(r.group->order(*op, r.user).ok());
      ops.push_back(std::move(op));
    };
    for (int turn = 0; turn < kTurns; ++turn) {
      std::vector<float>& values = given.emplace_back(kCount * ranks);
      for (size_t i = 0; i < values.size(); ++i) values[i] = value(r.context.rank, i, turn);
      copy(in, values.data(), kCount);
      run(job.gather(in, gathered, kCount));
      copy(in, gathered, kCount);  // nothing that a peer may still read
      copy(whole, values.data(), values.size());
      run(job.scatter(whole, part, kCount));
      copy(whole, gathered, values.size());
      copy(all, values.data(), kCount);
      run(job.reduce(all, kCount));
      for (auto [from, count] : {std::pair(gathered, values.size()), {part, kCount}, {all, kCount}})
        copy(got.emplace_back(count).data(), from, count);
    }
    ASSERT_TRUE(r.gpu.synchronize(r.user).ok());
    auto mine = static_cast<size_t>(r.context.rank);
    for (int turn = 0; turn < kTurns; ++turn) {
      auto at = static_cast<size_t>(turn) * 3;
      for (size_t i = 0; i < kCount; ++i) {
        float sum = 0, scattered = 0;
        for (int p = 0; p < r.context.ranks; ++p) {
          ASSERT_EQ(got[at][static_cast<size_t>(p) * kCount + i], value(p, i, turn));
          sum += value(p, i, turn);
          scattered += value(p, mine * kCount + i, turn);
        }
        ASSERT_EQ(got[at + 1][i], scattered);
        ASSERT_EQ(got[at + 2][i], sum);
      }
    }
  });
}

TEST(DeviceGroup, ARankWithoutADevicePreventsTheGroupOnAllHosts) {
  for (std::string layout : {"aa", "aab"}) {
    int last = static_cast<int>(layout.size()) - 1;
    run_world(layout, [last](RankContext& context) {
      HostDevice gpu;
      Imports imports(gpu);
      device::Stream main = gpu.create_stream().value();
      Status usable =
          context.rank == last ? Status(Code::kUnavailable, "no driver here") : Status();
      auto made = DeviceGroup::create(context.process, context.group, context.store, usable, &gpu,
                                      &imports, main, 1'000'000'000);
      ASSERT_FALSE(made.ok());
      EXPECT_TRUE(says(made.status(), "rank " + std::to_string(last)));
      EXPECT_TRUE(says(made.status(), "no driver here"));
      gpu.destroy_stream(main);
    });
  }
}

// Found when the group is made, and not by the first collective.
TEST(DeviceGroup, ADeviceThatCannotReadItsPeersPreventsTheGroupOnAllRanks) {
  using Peers = HostDevice::Peers;
  for (Peers peers : {Peers::kAbsent, Peers::kWrong}) {
    for (std::string layout : {"aa", "aaa", "aabb"}) {
      run_world(layout, [peers](RankContext& context) {
        HostDevice gpu;
        Imports imports(gpu);
        device::Stream main = gpu.create_stream().value();
        if (context.rank == 1) gpu.set_peers(peers);
        auto made = DeviceGroup::create(context.process, context.group, context.store, {}, &gpu,
                                        &imports, main, 10'000'000'000);
        ASSERT_FALSE(made.ok());
        std::string why = made.status().message();
        EXPECT_TRUE(says(why, "rank 1 (host-a): its GPU"));
        EXPECT_TRUE(says(why, "memory of rank 0"));
        EXPECT_EQ(imports.statistics().mapped, 0u);
        gpu.destroy_stream(main);
      });
    }
  }
}

// Each way in which a device may fail to do what operations consist of is found when the group is made, on all
// ranks, within a bounded time.
TEST(DeviceGroup, ADeviceThatRefusesOrLosesCommandsPreventsTheGroupOnAllRanks) {
  using Command = HostDevice::Command;
  using Fault = HostDevice::Fault;
  constexpr uint64_t kLimitNs = 4'000'000'000;
  for (auto [kind, name] : {std::pair(Command::kFlags, "flags"),
                            {Command::kEvent, "events"},
                            {Command::kCopies, "refuses"},
                            {Command::kSum, "refuses"},
                            {Command::kCopy, "refuses"}}) {
    for (Fault fault : {Fault::kRefused, Fault::kLost}) {
      if (kind == Command::kEvent && fault == Fault::kLost) continue;  // it is done at once
      for (std::string layout : {"a", "aa", "aaa", "ab", "aabb"}) {
        run_world(layout, [&, last = static_cast<int>(layout.size()) - 1](RankContext& context) {
          HostDevice gpu;
          Imports imports(gpu);
          device::Stream main = gpu.create_stream().value();
          if (context.rank == last) gpu.set_fault(kind, fault);
          auto from = std::chrono::steady_clock::now();
          auto made = DeviceGroup::create(context.process, context.group, context.store, {}, &gpu,
                                          &imports, main, kLimitNs);
          EXPECT_LT(std::chrono::steady_clock::now() - from, std::chrono::nanoseconds(kLimitNs));
          ASSERT_FALSE(made.ok()) << name << " of " << layout;
          EXPECT_TRUE(says(made.status(), "rank " + std::to_string(last) + " ("));
          if (fault == Fault::kRefused) EXPECT_TRUE(says(made.status(), name));
          EXPECT_EQ(imports.statistics().mapped, 0u);
          gpu.destroy_stream(main);
        });
      }
    }
  }
}

TEST(DeviceGroup, ATrialThatDoesNotEndIsGivenUpOnAllRanks) {
  run_world("aaa", [](RankContext& context) {
    HostDevice gpu;
    Imports imports(gpu);
    device::Stream main = gpu.create_stream().value();
    if (context.rank == 1) gpu.set_sum_duration(std::chrono::milliseconds(400));
    auto made = DeviceGroup::create(context.process, context.group, context.store, {}, &gpu,
                                    &imports, main, 2'000'000'000);
    ASSERT_FALSE(made.ok());
    EXPECT_TRUE(says(made.status(), "an operation with its peers has not ended"));
    gpu.destroy_stream(main);
  });
}

// What a peer has mapped does not return to the device when its owner frees it, and what happens to the peer's
// reads is not defined: the owner frees nothing that is mapped.
TEST(DeviceGroup, PeersEndTheirMappingsBeforeTheOwnerFreesTheMemory) {
  constexpr size_t kPieces = 40, kCount = 1024;
  RankBarrier gathered(3), counted(3), recalled(3);
  run_jobs("aaa", [&](DeviceRank& r, Job& job) {
    float* out = r.floats(3 * kCount);
    std::vector<float*> pieces;
    for (size_t i = 0; i < kPieces; ++i) {
      pieces.push_back(r.floats(kCount));
      ASSERT_TRUE(r.run(job.gather(pieces.back(), out, kCount)).ok());
    }
    gathered.arrive_and_wait();
    EXPECT_EQ(r.imports.statistics().mapped, 2 * kPieces * kCount * 4);
    counted.arrive_and_wait();
    for (float* piece : pieces) {
      EXPECT_EQ(r.gpu.recall(piece, kCount * 4), 0u);
      r.gpu.free(piece);
    }
    EXPECT_EQ(r.gpu.freed_while_mapped(), 0u);
    recalled.arrive_and_wait();
    EXPECT_EQ(r.imports.statistics().mapped, 0u);
    float* last = r.floats(kCount);
    ASSERT_TRUE(r.run(job.gather(last, out, kCount)).ok());
  });
}

// A further group of ranks.
struct FurtherGroup {
  FurtherGroup(DeviceRank& rank, const std::string& name, const std::vector<Rank>& of = {0, 1, 2})
      : r(rank),
        ranks(value_of(r.context.group.subgroup(r.context.store, name, of))),
        main(value_of(r.gpu.create_stream())),
        group(value_of(DeviceGroup::create(r.context.process, *ranks, r.context.store, {}, &r.gpu,
                                           &r.imports, main, 60'000'000'000))) {}
  ~FurtherGroup() {
    group->leave();
    group.reset();
    r.gpu.destroy_stream(main);
  }
  DeviceRank& r;
  std::unique_ptr<Group> ranks;
  device::Stream main;
  std::shared_ptr<DeviceGroup> group;
};

// Operations of two groups, each with more commands than a stream takes: while a rank submits one, its device
// takes no other. So all ranks have to submit them in the same order.
class DeviceGroups : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(OnOneHost, DeviceGroups, testing::Bool());

TEST_P(DeviceGroups, TwoGroupsWithFullStreamsDoNotBlockEachOther) {
  constexpr size_t kTensors = 100, kCount = 8;
  constexpr int kTurns = 40;
  auto body = [&](DeviceRank& r, Job& job) {
    FurtherGroup second(r, "second");
    float* in = r.floats(kTensors * kCount);
    for (size_t i = 0; i < kTensors * kCount; ++i) in[i] = value(r.context.rank, i, 0);
    float* outs[2] = {r.floats(3 * kTensors * kCount), r.floats(3 * kTensors * kCount)};
    std::vector<std::shared_ptr<DeviceOperation>> ops;
    for (int turn = 0; turn < kTurns; ++turn) {
      for (DeviceGroup* group : {r.group.get(), second.group.get()}) {
        auto op = job.gather(in, outs[group == r.group.get() ? 0 : 1], kTensors * kCount,
                             std::vector<size_t>(kTensors, kCount));
        ASSERT_TRUE(group->submit(op, r.user).ok());
        ops.push_back(op);
      }
    }
    for (size_t i = 0; i < ops.size(); ++i) {
      DeviceGroup& group = i % 2 == 0 ? *r.group : *second.group;
      ASSERT_TRUE(works(group.order(*ops[i], r.user)));
    }
    EXPECT_TRUE(r.gpu.synchronize(r.user).ok());
    for (float* out : outs) {
      for (size_t i = 0; i < 3 * kTensors * kCount; ++i)
        ASSERT_EQ(out[i],
                  value(static_cast<int>(i / (kTensors * kCount)), i % (kTensors * kCount), 0));
    }
  };
  run_jobs("aaa", body, GetParam());
}

// Groups with different ranks, whose operations become complete in another order than they were called, as ranks are
// late by turns. They have more commands than streams take.
TEST_P(DeviceGroups, GroupsOfPairsWithFullStreamsDoNotBlockOneAnother) {
  constexpr size_t kCount = 100;
  constexpr int kTurns = 200;
  auto body = [&](DeviceRank& r, Job&) {
    const int me = r.context.rank;
    struct Pair {
      std::unique_ptr<FurtherGroup> of;
      int other;  // rank
      float* out;
      std::vector<std::shared_ptr<DeviceOperation>> ops;
    };
    std::deque<Pair> pairs;
    for (auto [a, b] : {std::pair(0, 1), {1, 2}, {0, 2}}) {
      if (me != a && me != b) continue;
      auto of = std::make_unique<FurtherGroup>(r, "pair" + std::to_string(a) + std::to_string(b),
                                               std::vector<Rank>{a, b});
      pairs.push_back({std::move(of), a + b - me, r.floats(2 * kCount), {}});
    }
    float* in = r.floats(kCount);
    for (size_t i = 0; i < kCount; ++i) in[i] = value(me, i, 0);
    for (int turn = 0; turn < kTurns; ++turn) {
      for (Pair& pair : pairs) {
        if ((turn * 7 + me * 3 + pair.other) % 23 == 0)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        auto op = std::make_shared<JobOperation>();
        op->what.collective = Collective::kAllGather;
        op->what.bytes = kCount * 4;
        int mine = me < pair.other ? 0 : 1;
        plan_gather(*op, {pair.of->group->topology(), mine, false, false, true, {}},
                    {{bytes(in), kCount * 4}},
                    {{bytes(pair.out), kCount * 4}, {bytes(pair.out + kCount), kCount * 4}});
        ASSERT_TRUE(works(pair.of->group->submit(op, r.user)));
        pair.ops.push_back(op);
      }
    }
    for (Pair& pair : pairs) {
      for (auto& op : pair.ops) ASSERT_TRUE(works(pair.of->group->order(*op, r.user)));
    }
    EXPECT_TRUE(r.gpu.synchronize(r.user).ok());
    for (Pair& pair : pairs) {
      for (int part : {0, 1}) {
        int from = (part == 0) == (me < pair.other) ? me : pair.other;
        EXPECT_EQ(pair.out[static_cast<size_t>(part) * kCount + 7], value(from, 7, 0));
      }
    }
  };
  run_jobs("aaa", body, GetParam());
}

// An operation that a rank calls late, or in another order, holds up only its own group.
TEST(DeviceGroup, AnOperationThatARankHasNotCalledHoldsUpNoOtherGroup) {
  constexpr size_t kCount = 100;
  RankBarrier done(3);
  run_jobs(
      "aaa",
      [&](DeviceRank& r, Job& job) {
        FurtherGroup second(r, "second");
        float *in = r.floats(kCount), *outs[2] = {r.floats(3 * kCount), r.floats(3 * kCount)};
        auto late = job.gather(in, outs[0], kCount), op = job.gather(in, outs[1], kCount);
        if (r.context.rank != 1) ASSERT_TRUE(works(r.group->submit(late, r.user)));
        auto from = std::chrono::steady_clock::now();
        ASSERT_TRUE(works(second.group->submit(op, r.user)));
        ASSERT_TRUE(works(second.group->order(*op, r.user)));
        EXPECT_LT(std::chrono::steady_clock::now() - from, std::chrono::milliseconds(500));
        done.arrive_and_wait();
        if (r.context.rank == 1) ASSERT_TRUE(works(r.group->submit(late, r.user)));
        EXPECT_TRUE(works(r.wait(*late)));
      },
      true);
}

// On a GPU streams share eight hardware queues, and a stream that waits holds up all others of its queue.
TEST(DeviceGroup, GroupsThatWaitForPeersDoNotHoldUpTheDevicesOtherStreams) {
  constexpr size_t kCount = 100;
  RankBarrier all(3);
  run_jobs("aaa", [&](DeviceRank& r, Job& job) {
    std::deque<FurtherGroup> further;
    std::vector<std::shared_ptr<DeviceGroup>> groups{r.group};
    for (const char* name : {"second", "third", "fourth"})
      groups.push_back(further.emplace_back(r, name).group);
    device::Stream compute = r.gpu.create_stream().value();
    float *in = r.floats(kCount), *out = r.floats(3 * kCount * groups.size());
    // Rank 0's streams wait for the other ranks, which come to the operations later.
    uint32_t gate = r.context.rank == 0 ? 1 : 0;
    ASSERT_TRUE(r.gpu.wait_flag(r.user, &gate, 1).ok());
    std::vector<std::shared_ptr<DeviceOperation>> ops;
    for (size_t i = 0; i < groups.size(); ++i) {
      ops.push_back(job.gather(in, out + 3 * kCount * i, kCount));
      ASSERT_TRUE(groups[i]->submit(ops[i], r.user).ok());
    }
    if (r.context.rank == 0) {
      for (size_t i = 0; i < groups.size(); ++i)
        ASSERT_TRUE(groups[i]->order(*ops[i], r.user).ok());
      uint32_t computed = 0;
      ASSERT_TRUE(r.gpu.write_flag(compute, &computed, 1).ok());
      auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (std::atomic_ref(computed).load() == 0 && std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_EQ(std::atomic_ref(computed).load(), 1u);
      EXPECT_FALSE(groups[0]->closed(*ops[0]));
    }
    all.arrive_and_wait();
    std::atomic_ref(gate).store(1);
    for (size_t i = 0; i < groups.size(); ++i) {
      ASSERT_TRUE(groups[i]->order(*ops[i], r.user).ok());
      ASSERT_TRUE(r.gpu.synchronize(r.user).ok());
    }
    groups.clear();
    r.gpu.destroy_stream(compute);
  });
}

// As torch.cuda.graph does it: all ranks record, then replay without messages between the hosts' CPUs.
TEST(DeviceGroup, ARecordedGraphHoldsTheCollectivesOfItsStreamAndNoOthers) {
  constexpr size_t kCount = 100000;  // more than go without lanes
  RankBarrier all(3);
  run_jobs("aaa", [&](DeviceRank& r, Job& job) {
    device::Stream recorder = r.gpu.create_stream().value();
    float *in = r.floats(kCount), *out = r.floats(3 * kCount), *sum = r.floats(kCount);
    float *eager_in = r.floats(kCount), *eager_out = r.floats(3 * kCount);
    auto mine = static_cast<float>(r.context.rank + 1);
    std::fill_n(in, kCount, mine);
    std::fill_n(sum, kCount, 1.0f);
    out[0] = -1;
    std::fill_n(eager_in, kCount, 10 * mine);
    ASSERT_TRUE(r.gpu.begin_recording(recorder).ok());
    for (const auto& op : {job.gather(in, out, kCount), job.reduce(sum, kCount)}) {
      Status s = r.group->submit(op, recorder);
      ASSERT_TRUE(s.ok()) << s.message();
      s = r.group->order(*op, recorder);
      ASSERT_TRUE(s.ok()) << s.message();
    }
    // What another thread of the process does meanwhile.
    Status eager = r.run(job.gather(eager_in, eager_out, kCount));
    ASSERT_TRUE(eager.ok()) << eager.message();
    EXPECT_EQ(eager_out[3 * kCount - 1], 30);
    auto graph = value_of(r.gpu.end_recording(recorder));
    EXPECT_EQ(out[0], -1);
    EXPECT_EQ(sum[0], 1);
    std::fill_n(eager_out, 3 * kCount, 0.0f);
    for (int turn = 0; turn < 5; ++turn) {
      ASSERT_TRUE(r.gpu.launch(graph, recorder).ok());
    }
    ASSERT_TRUE(r.gpu.synchronize(recorder).ok());
    for (size_t p = 0; p < 3; ++p) EXPECT_EQ(out[p * kCount + 7], static_cast<float>(p + 1));
    EXPECT_EQ(sum[7], 243);  // 3^5
    EXPECT_EQ(eager_out[7], 0);
    all.arrive_and_wait();  // the peers read until here
    r.gpu.destroy_stream(recorder);
  });
}

// A rank may have ended after its part was done: the operations of the others get a while to end.
TEST(HostPeers, OnesThatEndedAreMissedAWhileAfterTheirEndAndTheOperationsStart) {
  Child child([](Child&) {});
  HostPeers peers({"rank 0", "rank 1"}, 0);
  peers.join({getpid(), child.pid()});
  constexpr uint64_t kGrace = 10;
  EXPECT_TRUE(peers.lost(1000, 1, kGrace, "it").ok());
  child.signal(SIGKILL);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOWAIT);
  EXPECT_TRUE(peers.lost(2000, 1, kGrace, "it").ok());
  EXPECT_TRUE(peers.lost(2009, 1, kGrace, "it").ok());
  EXPECT_TRUE(peers.lost(2012, 2005, kGrace, "a later one").ok());
  Status lost = peers.lost(2015, 2005, kGrace, "a later one");
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_TRUE(says(lost, "rank 1 (process"));
}

}  // namespace
}  // namespace smddp
