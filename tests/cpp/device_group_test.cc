// Collectives on device memory, on the device that threads simulate: flags, order, freed memory, failures.
#include "gpu/device_group.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "device_job.h"

namespace smddp {
namespace {

using device::HostDevice;
using intranode::CopyEngine;
using intranode::Imports;

class DeviceGroupOf : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DeviceGroupOf, testing::Values(1, 2, 3, 5));

// The replay of a CUDA graph does this: it submits the same work again, without messages between the ranks.
TEST(DeviceGroup, SubmittedWorkCanBeSubmittedAgain) {
  constexpr size_t kCount = 500;
  constexpr int kRanks = 3;
  std::vector<std::unique_ptr<HostDevice>> gpus;
  std::vector<std::unique_ptr<Imports>> imports;
  std::vector<device::Stream> mains;
  std::vector<std::unique_ptr<CopyEngine>> engines;
  std::vector<CopyEngine::Plan> plans(kRanks);
  std::vector<intranode::MemoryOffer> offers;
  std::vector<float*> data;
  for (int r = 0; r < kRanks; ++r) {
    HostDevice& gpu = *gpus.emplace_back(std::make_unique<HostDevice>());
    imports.push_back(std::make_unique<Imports>(gpu));
    mains.push_back(gpu.create_stream().value());
    engines.push_back(
        std::move(CopyEngine::create(gpu, *imports.back(), mains.back(), r, kRanks).value()));
    data.push_back(static_cast<float*>(gpu.allocate(kCount * 4).value()));
    for (size_t i = 0; i < kCount; ++i) data[static_cast<size_t>(r)][i] = 1;
    offers.push_back(
        intranode::MemoryOffer::make(gpu, {}, {{bytes(data[static_cast<size_t>(r)]), kCount * 4}}));
    CopyEngine::Plan& plan = plans[static_cast<size_t>(r)];
    plan.dtype = Dtype::kFloat32;
    plan.op = ReduceOp::kSum;
    for (int p = 0; p < kRanks; ++p) {
      size_t from = kCount * static_cast<size_t>(p) / kRanks;
      size_t to = kCount * static_cast<size_t>(p + 1) / kRanks;
      std::byte* at = bytes(data[static_cast<size_t>(r)] + from);
      if (p == r) plan.sums.push_back({0, from * 4, (to - from) * 4, at});
      plan.moves.push_back({p, 0, from * 4, (to - from) * 4, at});
    }
  }
  for (int r = 0; r < kRanks; ++r) {
    for (int p = 0; p < kRanks; ++p) {
      if (p == r) continue;
      auto& peer = *engines[static_cast<size_t>(p)];
      ASSERT_TRUE(engines[static_cast<size_t>(r)]->join(p, getpid(), peer.flags_descriptor()).ok());
    }
  }
  constexpr int kTimes = 10;
  // A thread for each rank: a stream takes fewer commands than these are, so a rank that submits waits for
  // the others.
  std::vector<std::thread> submitters;
  for (size_t r = 0; r < kRanks; ++r) {
    submitters.emplace_back([&, r] {
      for (int time = 0; time < kTimes; ++time)
        EXPECT_TRUE(engines[r]->submit(engines[r]->resolve(plans[r], offers).value()).ok());
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
  for (size_t r = 0; r < kRanks; ++r) ASSERT_TRUE(gpus[r]->synchronize(mains[r]).ok());
  for (size_t r = 0; r < kRanks; ++r) {
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(data[r][i], 59049.0f);  // 3^10
  }
  for (size_t r = 0; r < kRanks; ++r) {
    engines[r].reset();
    gpus[r]->destroy_stream(mains[r]);
  }
}

TEST(DeviceGroup, AMismatchErrorShowsBothCollectives) {
  run_jobs<Job>("aa", [](DeviceRank& r, Job& job) {
    float *in = r.floats(64), *out = r.floats(128);
    auto op = r.context.rank == 0 ? job.gather(in, out, 32) : job.scatter(out, in, 16);
    Status s = r.run(op);
    ASSERT_FALSE(s.ok());
    // A rank detects the mismatch itself, or gets the abort of the other rank.
    EXPECT_TRUE(s.code() == Code::kMismatch || s.code() == Code::kAborted) << s.message();
    EXPECT_NE(s.message().find("all_gather"), std::string::npos) << s.message();
    EXPECT_NE(s.message().find("reduce_scatter"), std::string::npos) << s.message();
    EXPECT_FALSE(r.group->submit(job.gather(in, out, 32), r.user).ok());
  });
}

TEST(DeviceGroup, MemoryThatCannotBeSharedFailsOnlyThatCallOnAllRanks) {
  run_jobs<Job>("aaa", [](DeviceRank& r, Job& job) {
    float *in = r.floats(32), *out = r.floats(96);
    std::vector<float> private_memory(32);
    Status s = r.run(job.gather(r.context.rank == 1 ? private_memory.data() : in, out, 32));
    ASSERT_FALSE(s.ok());
    EXPECT_NE(s.message().find("rank 1"), std::string::npos) << s.message();
    in[0] = 5;
    EXPECT_TRUE(r.run(job.gather(in, out, 32)).ok());
    EXPECT_EQ(out[64], 5);
  });
}

TEST(DeviceGroup, RunningOutOfDescriptorsFailsOnlyThatCallAndFreedMemoryMakesRoom) {
  constexpr size_t kPieces = 3;
  run_jobs<Job>("aa", [](DeviceRank& r, Job& job) {
    if (r.context.rank == 1) r.gpu.set_most_exported(kPieces);
    float* out = r.floats(64);
    std::vector<float*> pieces;
    for (size_t i = 0; i <= kPieces; ++i) pieces.push_back(r.floats(32));
    for (size_t i = 0; i < kPieces; ++i) ASSERT_TRUE(r.run(job.gather(pieces[i], out, 32)).ok());
    Status s = r.run(job.gather(pieces[kPieces], out, 32));
    ASSERT_FALSE(s.ok());
    EXPECT_NE(s.message().find("rank 1"), std::string::npos) << s.message();
    EXPECT_NE(s.message().find("Too many open files"), std::string::npos) << s.message();
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
  run_jobs<Job>(std::string(static_cast<size_t>(GetParam()), 'a'), [&](DeviceRank& r, Job& job) {
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
      EXPECT_NE(made.status().message().find("rank " + std::to_string(last)), std::string::npos);
      EXPECT_NE(made.status().message().find("no driver here"), std::string::npos);
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
        EXPECT_NE(why.find("rank 1 (host-a): its GPU"), std::string::npos) << why;
        EXPECT_NE(why.find("memory of rank 0"), std::string::npos) << why;
        EXPECT_EQ(imports.statistics().mapped, 0u);
        gpu.destroy_stream(main);
      });
    }
  }
}

// What a peer has mapped does not return to the device when its owner frees it, and what happens to the peer's
// reads is not defined: the owner frees nothing that is mapped.
TEST(DeviceGroup, PeersEndTheirMappingsBeforeTheOwnerFreesTheMemory) {
  constexpr size_t kPieces = 40, kCount = 1024;
  Meeting gathered(3), counted(3), recalled(3);
  run_jobs<Job>("aaa", [&](DeviceRank& r, Job& job) {
    float* out = r.floats(3 * kCount);
    std::vector<float*> pieces;
    for (size_t i = 0; i < kPieces; ++i) {
      pieces.push_back(r.floats(kCount));
      ASSERT_TRUE(r.run(job.gather(pieces.back(), out, kCount)).ok());
    }
    gathered.come();
    EXPECT_EQ(r.imports.statistics().mapped, 2 * kPieces * kCount * 4);
    counted.come();
    for (float* piece : pieces) {
      EXPECT_EQ(r.gpu.recall(piece, kCount * 4), 0u);
      r.gpu.free(piece);
    }
    EXPECT_EQ(r.gpu.freed_while_mapped(), 0u);
    recalled.come();
    EXPECT_EQ(r.imports.statistics().mapped, 0u);
    float* last = r.floats(kCount);
    ASSERT_TRUE(r.run(job.gather(last, out, kCount)).ok());
  });
}

// Rank 2 makes the call, but its stream never reaches the operation.
TEST(DeviceGroup, AStuckDeviceFailsAllRanksWithinTheLimit) {
  run_world("aaa", [](RankContext& context) {
    DeviceRank r(context, 0.5);
    Job job(r);
    float *in = r.floats(32), *out = r.floats(96);
    uint32_t never = 0;
    if (context.rank == 2) {
      ASSERT_TRUE(r.gpu.wait_flag(r.user, &never, 1).ok());
    }
    auto op = job.gather(in, out, 32);
    ASSERT_TRUE(r.group->submit(op, r.user).ok());
    Status s = r.failure();
    ASSERT_FALSE(s.ok());
    EXPECT_NE(s.message().find("0.5 s"), std::string::npos) << s.message();
    EXPECT_FALSE(r.group->submit(job.gather(in, out, 32), r.user).ok());
    std::atomic_ref(never).store(1);
    EXPECT_TRUE(r.gpu.synchronize(r.user).ok());
    EXPECT_TRUE(r.gpu.synchronize(r.main).ok());  // nothing hangs
  });
}

// Operations of two groups, each with more commands than a stream takes: while a rank submits one, its device
// takes no other. So all ranks have to submit them in the same order.
TEST(DeviceGroup, TwoGroupsWithFullStreamsDoNotBlockEachOther) {
  constexpr size_t kTensors = 100, kCount = 8;
  constexpr int kTurns = 40;
  run_jobs<Job>("aaa", [&](DeviceRank& r, Job& job) {
    auto sub = r.context.group.subgroup(r.context.store, "second", {0, 1, 2});
    ASSERT_TRUE(sub.ok());
    device::Stream main = r.gpu.create_stream().value();
    auto second = DeviceGroup::create(r.context.process, *sub.value(), r.context.store, {}, &r.gpu,
                                      &r.imports, main, 60'000'000'000);
    ASSERT_TRUE(second.ok()) << second.status().message();
    float* in = r.floats(kTensors * kCount);
    for (size_t i = 0; i < kTensors * kCount; ++i) in[i] = value(r.context.rank, i, 0);
    float* outs[2] = {r.floats(3 * kTensors * kCount), r.floats(3 * kTensors * kCount)};
    std::vector<std::shared_ptr<DeviceOperation>> ops;
    for (int turn = 0; turn < kTurns; ++turn) {
      for (DeviceGroup* group : {r.group.get(), second.value().get()}) {
        auto op = job.gather(in, outs[group == r.group.get() ? 0 : 1], kTensors * kCount,
                             std::vector<size_t>(kTensors, kCount));
        ASSERT_TRUE(group->submit(op, r.user).ok());
        ops.push_back(op);
      }
    }
    for (size_t i = 0; i < ops.size(); ++i) {
      DeviceGroup& group = i % 2 == 0 ? *r.group : *second.value();
      ASSERT_TRUE(works(group.order(*ops[i], r.user)));
    }
    EXPECT_TRUE(r.gpu.synchronize(r.user).ok());
    for (float* out : outs) {
      for (size_t i = 0; i < 3 * kTensors * kCount; ++i)
        ASSERT_EQ(out[i],
                  value(static_cast<int>(i / (kTensors * kCount)), i % (kTensors * kCount), 0));
    }
    second.value()->leave();
    second.value().reset();
    r.gpu.destroy_stream(main);
  });
}

// On a GPU streams share eight hardware queues, and a stream that waits holds up all others of its queue.
TEST(DeviceGroup, GroupsThatWaitForPeersDoNotHoldUpTheDevicesOtherStreams) {
  constexpr size_t kCount = 100;
  Meeting meeting(3);
  run_jobs<Job>("aaa", [&](DeviceRank& r, Job& job) {
    std::vector<std::unique_ptr<Group>> subgroups;
    std::vector<device::Stream> mains;
    std::vector<std::shared_ptr<DeviceGroup>> groups{r.group};
    for (std::string name : {"second", "third", "fourth"}) {
      auto sub = r.context.group.subgroup(r.context.store, name, {0, 1, 2});
      ASSERT_TRUE(sub.ok());
      subgroups.push_back(std::move(sub.value()));
      mains.push_back(r.gpu.create_stream().value());
      auto made = DeviceGroup::create(r.context.process, *subgroups.back(), r.context.store, {},
                                      &r.gpu, &r.imports, mains.back(), 60'000'000'000);
      ASSERT_TRUE(made.ok()) << made.status().message();
      groups.push_back(made.value());
    }
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
    meeting.come();
    std::atomic_ref(gate).store(1);
    for (size_t i = 0; i < groups.size(); ++i) {
      ASSERT_TRUE(groups[i]->order(*ops[i], r.user).ok());
      ASSERT_TRUE(r.gpu.synchronize(r.user).ok());
    }
    groups.erase(groups.begin());
    for (auto& group : groups) group->leave();
    groups.clear();
    for (device::Stream main : mains) r.gpu.destroy_stream(main);
    r.gpu.destroy_stream(compute);
  });
}

// As torch.cuda.graph does it: all ranks record, then replay without messages between the hosts' CPUs.
TEST(DeviceGroup, ARecordedGraphHoldsTheCollectivesOfItsStreamAndNoOthers) {
  constexpr size_t kCount = 500;
  Meeting meeting(3);
  run_jobs<Job>("aaa", [&](DeviceRank& r, Job& job) {
    device::Stream recorder = r.gpu.create_stream().value();
    float *in = r.floats(kCount), *out = r.floats(3 * kCount), *sum = r.floats(kCount);
    float *eager_in = r.floats(kCount), *eager_out = r.floats(3 * kCount);
    auto mine = static_cast<float>(r.context.rank + 1);
    std::fill_n(in, kCount, mine);
    std::fill_n(sum, kCount, 1.0f);
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
    auto graph = r.gpu.end_recording(recorder);
    ASSERT_TRUE(graph.ok()) << graph.status().message();
    EXPECT_EQ(out[0], 0);
    EXPECT_EQ(sum[0], 1);
    std::fill_n(eager_out, 3 * kCount, 0.0f);
    for (int turn = 0; turn < 5; ++turn) {
      ASSERT_TRUE(r.gpu.launch(graph.value(), recorder).ok());
    }
    ASSERT_TRUE(r.gpu.synchronize(recorder).ok());
    for (size_t p = 0; p < 3; ++p) EXPECT_EQ(out[p * kCount + 7], static_cast<float>(p + 1));
    EXPECT_EQ(sum[7], 243);  // 3^5
    EXPECT_EQ(eager_out[7], 0);
    meeting.come();  // the peers read until here
    r.gpu.destroy_stream(recorder);
  });
}

TEST(DeviceGroup, AnAbortReachesAllRanks) {
  run_jobs<Job>("aa", [](DeviceRank& r, Job& job) {
    float *in = r.floats(32), *out = r.floats(64);
    ASSERT_TRUE(r.run(job.gather(in, out, 32)).ok());
    auto from = std::chrono::steady_clock::now();
    if (r.context.rank == 0) {
      r.group->abort("stopped by rank 0");
    } else {
      Status s = r.run(job.gather(in, out, 32));  // rank 0 does not make this call
      EXPECT_FALSE(s.ok());
      EXPECT_NE(s.message().find("stopped by rank 0"), std::string::npos) << s.message();
      EXPECT_LT(std::chrono::steady_clock::now() - from, std::chrono::seconds(20));
    }
  });
}

// A rank may have ended after its part was done: the operations of the others get a while to end.
TEST(HostPeers, OnesThatEndedAreMissedAWhileAfterTheirEndAndTheOperationsStart) {
  pid_t child = fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  HostPeers peers({"rank 0", "rank 1"}, 0);
  peers.join({getpid(), child});
  constexpr uint64_t kGrace = 10;
  EXPECT_TRUE(peers.lost(1000, 1, kGrace, "it").ok());
  kill(child, SIGKILL);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  EXPECT_TRUE(peers.lost(2000, 1, kGrace, "it").ok());
  EXPECT_TRUE(peers.lost(2009, 1, kGrace, "it").ok());
  EXPECT_TRUE(peers.lost(2012, 2005, kGrace, "a later one").ok());
  Status lost = peers.lost(2015, 2005, kGrace, "a later one");
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_NE(lost.message().find("rank 1 (process"), std::string::npos) << lost.message();
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace smddp
