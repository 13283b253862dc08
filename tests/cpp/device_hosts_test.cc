// Collectives on device memory over several hosts, and with sums by the CPU, on the device that threads
// simulate: plans, the pipeline through pinned memory, failures.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>

#include "debug_setting.h"
#include "device_job.h"

namespace smddp {
namespace {

struct Layout {
  const char* hosts;
  bool on_cpu;
  bool by_nic = false;
  size_t queues = device::HostDevice::kQueues;
};

// Lets the NICs access the memory of the simulated device, which is host memory. Possible if the fabric
// sends chunks as RDMA writes.
struct ByNic {
  explicit ByNic(bool wanted) {
    if (wanted) set_.emplace("hmem", "1");
  }
  static bool possible(RankContext& context) {
    return context.process.open_fabric()->facts().writes;
  }

 private:
  std::optional<DebugSetting> set_;
};
class DeviceHostsOf : public testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(
    Layouts, DeviceHostsOf,
    testing::Values(Layout{"ab", false}, Layout{"aabb", false}, Layout{"abab", false},
                    Layout{"aab", false}, Layout{"abcabc", false}, Layout{"aaa", true},
                    Layout{"aabb", true}, Layout{"a", true}, Layout{"ab", false, true},
                    Layout{"aabb", false, true}, Layout{"abcde", false, true},
                    Layout{"abcabc", true, true}, Layout{"aab", false, true}, Layout{"a", false},
                    Layout{"aa", false}, Layout{"aaaaa", false}, Layout{"aaaaa", false, false, 1},
                    Layout{"ab", false, false, 1}, Layout{"aabb", false, false, 1}));

TEST_P(DeviceHostsOf, AllThreeCollectivesWithManyInFlight) {
  ByNic by_nic(GetParam().by_nic);
  run_world(GetParam().hosts, [](RankContext& context) {
    DeviceRank r(context, 20, {}, GetParam().queues);
    ASSERT_TRUE(r.group);
    if (r.group->topology().nodes() > 1)
      ASSERT_EQ(r.group->by_nic(), GetParam().by_nic && ByNic::possible(context));
    Job job(r, GetParam().on_cpu);
    std::vector<Checked> all;
    for (size_t count : {1003, 1, 140'000, 0}) {  // with lanes, too
      auto turn = static_cast<int>(all.size());
      all.emplace_back(job, Collective::kAllGather, count, turn);
      all.emplace_back(job, Collective::kReduceScatter, count, turn);
      all.emplace_back(job, Collective::kAllReduce, count, turn, ReduceOp::kAvg);
    }
    for (const Checked& each : all) ASSERT_TRUE(works(r.group->submit(each.op, r.user)));
    for (const Checked& each : all) each.check(job);
  });
}

class DeviceHostsBy : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Nic, DeviceHostsBy, testing::Bool());

// The operations are in place and have more chunks than there are buffers. So buffers are used again, with
// small operations before and after the large ones.
TEST_P(DeviceHostsBy, OperationsLargerThanTheBuffers) {
  constexpr size_t kCount = 5'300'001;
  ByNic by_nic(GetParam());
  run_jobs("ab", [](DeviceRank& r, Job& job) {
    float *small = r.floats(100), *out = r.floats(2 * kCount), *all = r.floats(kCount);
    auto mine = static_cast<size_t>(r.context.rank);
    for (size_t i = 0; i < 100; ++i) small[i] = 1;
    for (size_t i = 0; i < kCount; ++i) {
      out[mine * kCount + i] = value(r.context.rank, i, 1);
      all[i] = value(r.context.rank, i, 2);
    }
    std::vector<std::shared_ptr<DeviceOperation>> ops{
        job.reduce(small, 100), job.gather(out + mine * kCount, out, kCount),
        job.reduce(small, 100), job.reduce(all, kCount), job.reduce(small, 100)};
    for (auto& op : ops) {
      ASSERT_TRUE(works(r.group->submit(op, r.user)));
    }
    for (auto& op : ops) {
      ASSERT_TRUE(works(r.wait(*op)));
    }
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(out[i], value(0, i, 1)) << i;
      ASSERT_EQ(out[kCount + i], value(1, i, 1)) << i;
      ASSERT_EQ(all[i], value(0, i, 2) + value(1, i, 2)) << i;
    }
    EXPECT_EQ(small[99], 8);
  });
}

// The operation has more commands than a stream takes. The thread that submits it waits for room, which the
// network makes.
TEST_P(DeviceHostsBy, AnOperationWithMoreCommandsThanAStreamTakes) {
  constexpr size_t kCount = 33'000'003;  // 63 chunks
  ByNic by_nic(GetParam());
  run_jobs("ab", [](DeviceRank& r, Job& job) {
    float* all = r.floats(2 * kCount);
    float* own = all + static_cast<size_t>(r.context.rank) * kCount;
    for (size_t i = 0; i < kCount; ++i) own[i] = value(r.context.rank, i, 1);
    Status s = r.run(job.gather(own, all, kCount));
    if (s) s = r.group->verdict(*job.last);
    ASSERT_TRUE(s.ok()) << s.message();
    for (size_t i = 0; i < 2 * kCount; ++i)
      ASSERT_EQ(all[i], value(static_cast<int>(i / kCount), i % kCount, 1)) << i;
  });
}

// The CPU touches no byte of an AllGather: all bytes are sent as chunks, even of small operations, from
// the memory of one device into the memory of the other.
TEST(DeviceHosts, WithNicAccessToTheDeviceAllBytesAreSentInChunks) {
  ByNic by_nic(true);
  run_jobs("abc", [](DeviceRank& r, Job& job) {
    if (!ByNic::possible(r.context)) return;
    const transport::Counters& counters = r.context.process.open_fabric()->counters();
    for (size_t count : {1ul, 100ul, 300'000ul}) {
      float *in = r.floats(count), *out = r.floats(3 * count);
      for (size_t i = 0; i < count; ++i) in[i] = value(r.context.rank, i, 0);
      uint64_t before = counters.chunk_bytes_sent;
      ASSERT_TRUE(works(r.run(job.gather(in, out, count))));
      EXPECT_EQ(counters.chunk_bytes_sent - before, 2 * count * 4);
      for (int p = 0; p < 3; ++p) {
        for (size_t i = 0; i < count; ++i)
          ASSERT_EQ(out[static_cast<size_t>(p) * count + i], value(p, i, 0));
      }
    }
    EXPECT_STREQ(name_of_way(job.place, false), "hmem + fabric");
  });
}

// Of an AllGather only the own block is copied within a GPU, which some drivers do by a kernel; in place it is not.
TEST(DeviceHosts, AnAllGatherInPlaceTakesNoMultiprocessor) {
  for (std::string layout : {"aaa", "ab", "aabb"}) {
    run_jobs(layout, [](DeviceRank& r, Job& job) {
      const auto n = static_cast<size_t>(r.context.ranks),
                 mine = static_cast<size_t>(r.context.rank);
      const size_t most = 300'000;  // more than goes without lanes
      float *in = r.floats(n * most), *out = r.floats(n * most), *sums = r.floats(most);
      r.gpu.hold_multiprocessors(true);
      for (size_t count : {size_t{1000}, most}) {
        auto op = job.gather(out + mine * count, out, count);
        ASSERT_TRUE(works(r.group->submit(op, r.user)));
        auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (!r.group->closed(*op) && std::chrono::steady_clock::now() < until)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_TRUE(r.group->closed(*op)) << count << " over " << r.context.ranks << " ranks";
      }
      std::vector ops{job.gather(in, out, most), job.scatter(in, sums, most)};
      for (auto& op : ops) ASSERT_TRUE(works(r.group->submit(op, r.user)));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      for (auto& op : ops) EXPECT_FALSE(r.group->closed(*op));
      r.gpu.hold_multiprocessors(false);
      for (auto& op : ops) EXPECT_TRUE(works(r.finish(*op)));
    });
  }
}

// The CPU codes what it sends of pinned memory, with the types of the tensors.
TEST(DeviceHosts, ChunksOfAllCollectivesAreCoded) {
  for (std::string layout : {"ab", "aabb"}) {
    for (bool on_cpu : {false, true}) {
      run_jobs(layout, [&](DeviceRank& r, Job& job) {
        job.place.tuning.coding = Coding::kOn;
        job.place.sums_on_cpu = on_cpu;
        for (auto collective :
             {Collective::kAllGather, Collective::kReduceScatter, Collective::kAllReduce}) {
          Checked each(job, collective, 1'200'003, 1);
          ASSERT_TRUE(works(r.group->submit(each.op, r.user)));
          each.check(job);
          auto& op = static_cast<JobOperation&>(*each.op);
          while (!op.told_closed) std::this_thread::yield();
          EXPECT_GT(op.sent.raw, 1'000'000u) << name_of(collective) << " over " << layout;
          EXPECT_LT(op.sent.sent, op.sent.raw / 10 * 9) << name_of(collective);
        }
      });
    }
  }
}

// A collective waits for the earlier work of the caller's stream. Only the stream waits for the other host.
TEST(DeviceHosts, TheCpuDoesNotWaitAndStreamsKeepTheOrder) {
  run_jobs("ab", [](DeviceRank& r, Job& job) {
    float *in = r.floats(1000), *out = r.floats(2000), *after = r.floats(2000);
    std::vector<float> written(1000, static_cast<float>(r.context.rank + 1));
    uint32_t gate = 0;
    ASSERT_TRUE(r.gpu.wait_flag(r.user, &gate, 1).ok());
    ASSERT_TRUE(r.gpu.copy(r.user, in, written.data(), 4000).ok());
    auto op = job.gather(in, out, 1000);
    ASSERT_TRUE(r.group->submit(op, r.user).ok());
    Status s = r.group->order(*op, r.user);  // returns before anything has been sent
    ASSERT_TRUE(s.ok()) << s.message();
    ASSERT_TRUE(r.gpu.copy(r.user, after, out, 8000).ok());
    EXPECT_FALSE(r.group->closed(*op));
    std::atomic_ref(gate).store(1);
    ASSERT_TRUE(r.gpu.synchronize(r.user).ok());
    EXPECT_EQ(after[999], 1);
    EXPECT_EQ(after[1999], 2);
  });
}

TEST(DeviceHosts, AGathersCopiesInsideTheHostBeginWhileDataComeFromOtherHosts) {
  constexpr size_t kCount = 2 << 20;  // floats: four chunks, and as many parts
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::atomic<bool> began{false}, expired{false};
  run_jobs("aabb", [&](DeviceRank& r, Job& job) {
    float *in = r.floats(kCount), *out = r.floats(4 * kCount);
    for (size_t i = 0; i < kCount; ++i) in[i] = value(r.context.rank, i, 0);
    r.gpu.set_gate([&, rank = r.context.rank](const void* to, const void* from) {
      // Rank 1 reads from rank 0 what rank 2 has sent. Rank 2 sends its last chunk after that.
      if (rank == 1 && to == out + 2 * kCount) began = true;
      if (rank != 2 || from != in + kCount / 4 * 3 || began) return true;
      if (std::chrono::steady_clock::now() > until) expired = true;
      return expired.load();
    });
    auto op = job.gather(in, out, kCount, {100'003, kCount - 100'010, 0, 7});
    Status s = r.run(op);
    if (s) s = r.group->verdict(*op);
    ASSERT_TRUE(s.ok()) << s.message();
    EXPECT_FALSE(expired);
    for (size_t i = 0; i < 4 * kCount; ++i)
      ASSERT_EQ(out[i], value(static_cast<int>(i / kCount), i % kCount, 0)) << i;
  });
}

// Tests of failures with several ranks on a host use sums, here and below: a rank whose waits are released
// after a failure may still read its peers' inputs, and no rank writes these.

// The thread that submits waits for room in a stream that does not move. Nothing else of the group waits for
// that thread: the deadline passes, and the streams are released.
TEST(DeviceHosts, ARankThatDoesNotCallIsMissedWhileAStreamIsFull) {
  constexpr size_t kCount = 33'000'003;
  run_jobs("ab", [](DeviceRank& r, Job& job) {
    r.group->set_limit(1'000'000'000);
    if (r.context.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3500));
      return;
    }
    float* all = r.floats(2 * kCount);
    auto op = job.gather(all, all, kCount), next = job.gather(all, all, kCount);
    ASSERT_TRUE(r.group->submit(op, r.user).ok());
    std::thread caller([&] { (void)r.group->submit(next, r.user); });
    Status s = r.failure();
    expect_ended(r, s ? r.group->verdict(*op) : s, {"rank 1", "host-b"});
    caller.join();
  });
}

TEST(DeviceHosts, AMismatchShowsBothCollectives) {
  for (const char* layout : {"aa", "ab"}) {
    run_jobs(layout, [](DeviceRank& r, Job& job) {
      float *in = r.floats(64), *out = r.floats(128);
      auto op = r.context.rank == 0 ? job.gather(in, out, 32) : job.scatter(out, in, 16);
      expect_failure(r, op, {"all_gather", "reduce_scatter"});
      EXPECT_FALSE(r.group->submit(job.gather(in, out, 32), r.user).ok());
    });
  }
}

// The last rank makes the call, but its stream never reaches the operation, and its device never copies its data
// out. The other ranks, of its host or of another one, which wait for it, get the failure.
TEST(DeviceHosts, AStuckDeviceFailsAllRanksWithinTheLimit) {
  for (auto [layout, words] : {std::pair("aaa", "0.5 s"), {"ab", "rank 1"}}) {
    run_jobs(layout, [words = std::string(words)](DeviceRank& r, Job& job) {
      r.group->set_limit(500'000'000);
      float *in = r.floats(32), *out = r.floats(96);
      uint32_t never = 0;
      if (r.context.rank == r.context.ranks - 1)
        ASSERT_TRUE(r.gpu.wait_flag(r.user, &never, 1).ok());
      ASSERT_TRUE(r.group->submit(job.gather(in, out, 32), r.user).ok());
      Status s = r.failure();
      ASSERT_FALSE(s.ok());
      EXPECT_TRUE(says(s, words));
      EXPECT_FALSE(r.group->submit(job.gather(in, out, 32), r.user).ok());
      std::atomic_ref(never).store(1);
      EXPECT_TRUE(r.gpu.synchronize(r.user).ok());
      EXPECT_TRUE(r.gpu.synchronize(r.main).ok());  // nothing hangs
    });
  }
}

TEST(DeviceHosts, AnAbortReachesAllRanks) {
  for (std::string layout : {"aa", "aabb"}) {
    // An abort also ends what is still under way on other ranks.
    std::barrier first_is_complete(static_cast<std::ptrdiff_t>(layout.size()));
    run_jobs(layout, [&](DeviceRank& r, Job& job) {
      float *in = r.floats(128), *out = r.floats(32);
      EXPECT_TRUE(r.run(job.scatter(in, out, 32)).ok());
      first_is_complete.arrive_and_wait();
      if (r.context.rank != 0)
        return expect_failure(r, job.scatter(in, out, 32), {"stopped by rank 0"});
      r.group->abort("stopped by rank 0");
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
    });
  }
}

// Rank 1 waits for rank 3's data. Its streams go on when it fails, and rank 0, which has all of rank 2's, then reads
// from it what never came.
TEST(DeviceHosts, WhatComesFromAPeerThatFailedIsNotTakenForAResult) {
  on_threads(5, [](int) {
    RankBarrier failed(4);
    run_jobs("aabb", [&](DeviceRank& r, Job& job) {
      constexpr size_t kCount = 1000;
      r.gpu.set_unordered(true);  // released streams copy what a peer still writes
      float *in = r.floats(kCount), *out = r.floats(4 * kCount);
      uint32_t never = 0;
      if (r.context.rank == 3) ASSERT_TRUE(r.gpu.wait_flag(r.user, &never, 1).ok());
      auto op = job.gather(in, out, kCount);
      ASSERT_TRUE(r.group->submit(op, r.user).ok());
      if (r.context.rank == 3) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        r.group->abort("stopped by rank 3");
      } else if (r.group->order(*op, r.user)) {
        (void)r.gpu.synchronize(r.user);
        Status next = r.group->submit(job.gather(in, out, kCount), r.user);
        EXPECT_FALSE(next.ok()) << "rank " << r.context.rank << " goes on with what it got";
        EXPECT_FALSE(r.group->verdict(*op).ok()) << "on rank " << r.context.rank;
      }
      EXPECT_FALSE(r.failure().ok());
      failed.arrive_and_wait();
      std::atomic_ref(never).store(1);
      (void)r.gpu.synchronize(r.user);  // the stream reads `never`
    });
  });
}

// wait() has returned, and the callers' streams have more work behind it when the operation fails. Until the process
// ends, none of that is done.
TEST(DeviceHosts, NothingGoesOnWithAnOperationThatFailsAfterItsWait) {
  for (std::string layout : {"aa", "ab", "aabb"}) {
    auto last = static_cast<int>(layout.size()) - 1;
    RankBarrier ended(last + 1);
    run_world(layout, [&](RankContext& context) {
      uint32_t never = 0, after = 0;
      std::atomic<int> told{0}, early{0};
      DeviceRank r(context, 60, [&](const Status& why) {
        ++told;
        early += std::atomic_ref(after).load() != 0 || !says(why, "stopped by rank");
      });
      ASSERT_TRUE(r.group);
      r.gpu.set_unordered(true);  // the streams that leave() releases copy what a peer still writes
      r.gpu.set_duration(std::chrono::milliseconds(20));  // and have not done so when it goes on
      Job job(r);
      float *in = r.floats(1000), *out = r.floats(4000);
      if (context.rank == last) ASSERT_TRUE(r.gpu.wait_flag(r.user, &never, 1).ok());
      auto op = job.gather(in, out, 1000);
      ASSERT_TRUE(r.group->submit(op, r.user).ok());
      ASSERT_TRUE(works(r.group->order(*op, r.user)));
      ASSERT_TRUE(works(r.group->verdict(*op)));
      ASSERT_TRUE(r.gpu.write_flag(r.user, &after, 1).ok());
      if (context.rank == last) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        r.group->abort("stopped by rank " + std::to_string(last));
      } else {
        auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (told == 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        EXPECT_EQ(told, 1) << "on rank " << context.rank << " over " << layout;
        EXPECT_EQ(early, 0) << "on rank " << context.rank << " over " << layout;
      }
      ended.arrive_and_wait();
      std::atomic_ref(never).store(1);
      r.group->leave();
      (void)r.gpu.synchronize(r.user);
    });
  }
}

TEST(DeviceHosts, MemoryThatOneHostCannotShareFailsAllHosts) {
  run_jobs("aabb", [](DeviceRank& r, Job& job) {
    float *in = r.floats(128), *out = r.floats(32);
    std::vector<float> private_memory(128);
    auto op = job.scatter(r.context.rank == 1 ? private_memory.data() : in, out, 32);
    expect_failure(r, op, {"rank 1", "not memory of the device"});
    EXPECT_FALSE(r.group->submit(job.scatter(in, out, 32), r.user).ok());
  });
}

// At the end of a process, the engine shuts down before its groups leave.
TEST(DeviceHosts, AGroupCanLeaveAfterTheEngineHasShutDown) {
  run_jobs("ab", [](DeviceRank& r, Job& job) {
    float *in = r.floats(32), *out = r.floats(64);
    ASSERT_TRUE(r.run(job.gather(in, out, 32)).ok());
    auto op = job.gather(in, out, 32);
    if (r.context.rank == 0) {
      ASSERT_TRUE(r.group->submit(op, r.user).ok());  // rank 1 does not make this call
    }
    r.context.engine.shutdown();
    auto from = std::chrono::steady_clock::now();
    r.group->leave();
    EXPECT_LT(std::chrono::steady_clock::now() - from, std::chrono::seconds(20));
    EXPECT_TRUE(r.gpu.synchronize(r.main).ok());  // nothing hangs
  });
}

}  // namespace
}  // namespace smddp
