// What overlaps between hosts, on the device that threads simulate: the parts of one operation, and what must not.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "device_job.h"

namespace smddp {
namespace {

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

using Extents = std::vector<Extent>;

Extents all(const Blocks& blocks, size_t count) {
  Extents found;
  for (size_t r = 0; r < count; ++r) {
    for (const Extent& e : blocks.slice(static_cast<Rank>(r), 0, SIZE_MAX)) found.push_back(e);
  }
  return found;
}
// What the operation's first exchange among `ranks` copies out of the device.
Extents out(const Checked& checked, size_t ranks) {
  const DeviceExchange& first = checked.op->exchanges.front();
  return all(first.out, first.collective == Collective::kAllGather ? 1 : ranks);
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

}  // namespace
}  // namespace smddp
