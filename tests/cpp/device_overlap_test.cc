// What overlaps between hosts, on the device that threads simulate: operations of one group, and what must not.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "device_job.h"
#include "gpu/footprint.h"

namespace smddp {
namespace {

bool within(const std::vector<Extent>& extents, const void* at) {
  auto* byte = static_cast<const std::byte*>(at);
  return std::any_of(extents.begin(), extents.end(), [byte](const Extent& e) {
    return e.address <= byte && byte < e.address + e.bytes;
  });
}

// Opens for good once it is told so, or after 20 s, and then the test has failed.
class Gate {
 public:
  void open() { open_ = true; }
  bool passes() {
    if (!open_ && std::chrono::steady_clock::now() > until_) expired_ = true;
    return open_ || expired_;
  }
  ~Gate() { EXPECT_FALSE(expired_); }

 private:
  const std::chrono::steady_clock::time_point until_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::atomic<bool> open_{false}, expired_{false};
};

struct Case {
  const char* hosts;
  Collective collective;
};

class DeviceOverlapOf : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Layouts, DeviceOverlapOf,
    testing::Values(Case{"ab", Collective::kAllGather}, Case{"ab", Collective::kReduceScatter},
                    Case{"ab", Collective::kAllReduce}, Case{"aabb", Collective::kAllGather},
                    Case{"aabb", Collective::kReduceScatter}, Case{"aabb", Collective::kAllReduce},
                    Case{"aab", Collective::kAllReduce}));

using Extents = std::vector<Extent>;

Extents all(const Blocks& blocks, size_t count) {
  Extents found;
  for (size_t r = 0; r < count; ++r) {
    for (const Extent& e : blocks.slice(static_cast<Rank>(r), 0, SIZE_MAX)) found.push_back(e);
  }
  return found;
}
// What the operation's first exchange among `ranks` copies out of the device, and its last one in.
Extents out(const Checked& checked, size_t ranks) {
  const DeviceExchange& first = checked.op->exchanges.front();
  return all(first.out, first.collective == Collective::kAllGather ? 1 : ranks);
}
Extents in(const Checked& checked, size_t ranks) {
  const DeviceExchange& last = checked.op->exchanges.back();
  return all(last.in, last.collective == Collective::kReduceScatter ? 1 : ranks);
}

// On host a, the first operation is copied in only once the second is copied out. What host b contributes to the
// first is copied out only then.
TEST_P(DeviceOverlapOf, AnOperationLeavesWhileTheOneBeforeIsOnItsWayOrComesIn) {
  Gate second_leaves;
  run_jobs(GetParam().hosts, [&](DeviceRank& r, Job& job) {
    Checked first(job, GetParam().collective, 10'000, 1);
    Checked second(job, GetParam().collective, 10'000, 2);
    Checked third(job, GetParam().collective, 300'000, 3);
    const Topology& topology = r.context.group.topology();
    auto among = static_cast<size_t>(first.op->among_all ? r.context.ranks : topology.nodes());
    bool here = r.context.rank == 0, there = r.context.rank == topology.node(1)[0];
    r.gpu.set_gate([&, in = in(first, among), out = out(first, among), next = out(second, among)](
                       const void* to, const void* from) {
      if (here && within(next, from)) second_leaves.open();
      bool held = (here && within(in, to) && !within(in, from)) || (there && within(out, from));
      return !held || second_leaves.passes();
    });
    for (const Checked* each : {&first, &second, &third}) {
      ASSERT_TRUE(works(r.group->submit(each->op, r.user)));
    }
    for (const Checked* each : {&first, &second, &third}) each->check(job);
  });
}

// The ReduceScatter's last chunk leaves only once the AllGather's first has come.
TEST(DeviceOverlap, TheSumsOfAnAllReduceComeBackWhileOthersAreOnTheirWay) {
  constexpr size_t kCount = 4 << 20, kChunk = 2 << 20;  // four chunks of each half
  run_jobs("ab", [](DeviceRank& r, Job& job) {
    Gate gathered;
    Checked sum(job, Collective::kAllReduce, kCount, 1);
    std::byte* other = out(sum, 2)[static_cast<size_t>(1 - r.context.rank)].address;
    r.gpu.set_gate([&, other](const void* to, const void* from) {
      if (to == other) gathered.open();
      return from != other + 3 * kChunk || gathered.passes();
    });
    ASSERT_TRUE(works(r.group->submit(sum.op, r.user)));
    sum.check(job);
  });
}

// Of a tensor's four parts, the first are between the hosts while the last are not yet summed.
TEST(DeviceOverlap, SumsLeaveTheHostBeforeAllAreMade) {
  constexpr size_t kCount = 2 << 20;
  for (Collective collective : {Collective::kReduceScatter, Collective::kAllReduce}) {
    run_jobs("aabb", [collective](DeviceRank& r, Job& job) {
      std::atomic<size_t> made{0};
      size_t count = collective == Collective::kAllReduce ? 4 * kCount : kCount;
      Checked sum(job, collective, count, 1);
      std::byte* first = out(sum, 2).front().address;
      size_t before = r.gpu.sums();
      r.gpu.set_gate([&, first](const void*, const void* from) {
        if (from == first && made == 0) made = r.gpu.sums() - before;
        return true;
      });
      ASSERT_TRUE(works(r.group->submit(sum.op, r.user)));
      sum.check(job);
      EXPECT_EQ(made, 2u);  // one for each host
      EXPECT_EQ(r.gpu.sums() - before, 8u);
    });
  }
}

// Rank 1 reads from rank 0 the first part of the sums of all hosts. Rank 2 sends the last part after that.
TEST(DeviceOverlap, AnAllReducesCopiesInsideTheHostBeginWhileSumsComeFromOtherHosts) {
  constexpr size_t kCount = 8 << 20, kChunk = 2 << 20;
  Gate copied;
  run_jobs("aabb", [&](DeviceRank& r, Job& job) {
    Checked sum(job, Collective::kAllReduce, kCount, 1);
    std::byte *first = bytes(sum.result), *last = out(sum, 2).front().address + 3 * kChunk;
    r.gpu.set_gate([&, first, last, rank = r.context.rank](const void* to, const void* from) {
      if (rank == 1 && to == first) copied.open();
      return rank != 2 || from != last || copied.passes();
    });
    ASSERT_TRUE(works(r.group->submit(sum.op, r.user)));
    sum.check(job);
  });
}

class DeviceOrderOf : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Hosts, DeviceOrderOf, testing::Values("ab", "abc", "aabb", "aab"));

// Each operation reads what the one before writes, and writes what an earlier one reads; no thread waits.
TEST_P(DeviceOrderOf, OperationsOnTheSameMemoryKeepTheirOrder) {
  constexpr size_t kCount = 3001;
  run_jobs(GetParam(), [](DeviceRank& r, Job& job) {
    r.gpu.set_duration(std::chrono::microseconds(300 + 500 * (r.context.rank % 2)));
    auto ranks = static_cast<size_t>(r.context.ranks);
    float *part = r.floats(kCount), *all = r.floats(ranks * kCount), *own = r.floats(kCount);
    for (size_t i = 0; i < kCount; ++i) part[i] = value(r.context.rank, i, 0);
    std::vector<std::shared_ptr<DeviceOperation>> ops;
    for (int turn = 0; turn < 2; ++turn) {
      ops.push_back(job.gather(part, all, kCount));
      ops.push_back(job.scatter(all, part, kCount));
      ops.push_back(job.reduce(part, kCount, ReduceOp::kAvg));
      ops.push_back(job.gather(part, all, kCount));
      ops.push_back(job.scatter(all, own, kCount, ReduceOp::kMax));
    }
    for (const auto& op : ops) {
      ASSERT_TRUE(works(r.group->submit(op, r.user)));
    }
    for (const auto& op : ops) {
      ASSERT_TRUE(works(r.finish(*op)));
    }
    for (size_t i = 0; i < kCount; ++i) {
      float sum = 0;  // of all ranks' parts
      for (int p = 0; p < r.context.ranks; ++p) sum += value(p, i, 0);
      float expected =
          sum * static_cast<float>(r.context.ranks);  // the second turn's sum of equal parts
      ASSERT_EQ(part[i], expected) << i;
      ASSERT_EQ(own[i], expected) << i;
      for (size_t p = 0; p < ranks; ++p) ASSERT_EQ(all[p * kCount + i], expected) << i;
    }
  });
}

TEST(Footprint, MeetsWhatWritesItsMemoryAndWhatItWrites) {
  std::byte memory[100];
  auto made = [&](std::vector<std::pair<size_t, size_t>> reads,
                  std::vector<std::pair<size_t, size_t>> writes) {
    Footprint footprint;
    for (auto [from, to] : reads) footprint.read({memory + from, to - from});
    for (auto [from, to] : writes) footprint.write({memory + from, to - from});
    footprint.close();
    return footprint;
  };
  Footprint one = made({{50, 60}, {10, 20}, {15, 30}}, {{70, 80}, {40, 45}});
  EXPECT_FALSE(one.overlaps(made({{0, 40}, {45, 70}}, {{80, 90}})));  // both read
  EXPECT_TRUE(one.overlaps(made({{79, 81}}, {})));
  EXPECT_TRUE(one.overlaps(made({}, {{44, 45}})));
  EXPECT_TRUE(one.overlaps(made({}, {{29, 31}})));
  EXPECT_FALSE(one.overlaps(made({}, {{30, 40}, {45, 50}, {60, 70}, {0, 10}, {80, 100}})));
  EXPECT_FALSE(one.overlaps(made({{10, 10}}, {{75, 75}})));  // nothing
  EXPECT_FALSE(one.overlaps(made({}, {})));
}

}  // namespace
}  // namespace smddp
