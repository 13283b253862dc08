// Ranks that are late: the bytes that their peers send them meanwhile are bounded, and none is lost.
#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>

#include "world.h"

namespace smddp {
namespace {

using std::chrono::milliseconds;

uint64_t bytes_sent(Process& process) {
  transport::Transport* transport = process.open_fabric();
  if (transport == nullptr) return 0;
  Engine::Lock lock = process.engine().lock();
  const transport::Counters& counters = transport->counters();
  return counters.bytes_sent + counters.chunk_bytes_sent;
}

// Every rank submits `count` gathers of `floats` each; the last rank is late. check(bytes) gets what each
// other rank has sent by then.
void gathers_with_a_late_rank(const std::string& layout, int count, size_t floats,
                              const std::function<void(uint64_t)>& check) {
  std::atomic<int> checked{0};
  run_world(layout, [&](RankContext& c) {
    std::vector<float> first(1, 1.0f), all(static_cast<size_t>(c.ranks));
    ASSERT_TRUE(c.run(gather_of(first, all, c.ranks)).ok());
    bool late = c.rank == c.ranks - 1;
    while (late && checked < c.ranks - 1) std::this_thread::sleep_for(milliseconds(1));
    uint64_t before = bytes_sent(c.process);
    std::vector<std::vector<float>> in, out;
    std::vector<std::shared_ptr<Operation>> ops;
    for (int i = 0; i < count; ++i) {
      in.emplace_back(floats, static_cast<float>(100 * c.rank + i));
      out.emplace_back(floats * static_cast<size_t>(c.ranks));
    }
    for (size_t i = 0; i < in.size(); ++i) {
      ops.push_back(gather_of(in[i], out[i], c.ranks));
      c.group.submit(ops.back(), {}, true);
    }
    if (!late) {
      std::this_thread::sleep_for(milliseconds(200));
      check(bytes_sent(c.process) - before);
      ++checked;
    }
    for (auto& op : ops) {
      c.engine.wait(*op);
      ASSERT_TRUE(op->status().ok()) << op->status().message();
    }
    for (size_t i = 0; i < out.size(); ++i) {
      for (size_t at = 0; at < out[i].size(); ++at) {
        ASSERT_EQ(out[i][at], static_cast<float>(100 * (at / floats) + i));
      }
    }
  });
}

TEST(Pressure, SmallFragmentsGoToALateRankUpToItsCredit) {
  gathers_with_a_late_rank("AB", 100, 8 << 10, [](uint64_t sent) {
    EXPECT_GT(sent, 32u << 10);            // the sender did not wait for the late rank
    EXPECT_LE(sent, (256u << 10) + 4096);  // a peer's credit, and the headers
  });
}

TEST(Pressure, ThePeersOfALateRankShareItsMemory) {
  gathers_with_a_late_rank("ABCD", 100, 2 << 10, [](uint64_t sent) {
    EXPECT_GT(sent, 8u << 10);
    // At most the fragments in flight to the punctual peers, and the credit of the late one.
    EXPECT_LE(sent, 3 * (256u << 10) + (64u << 10));
  });
}

TEST(Pressure, OfLargeFragmentsOnlyEagerPrefixesGoToALateRank) {
  gathers_with_a_late_rank("AB", 20, 1 << 18, [](uint64_t sent) {
    EXPECT_GE(sent, kEagerPrefixBytes);
    EXPECT_LE(sent, (256u << 10) + 8192);  // a peer's credit, and READYs
  });
}

// What has arrived makes room for more: so the receiver allows large parts at a time.
TEST(Pressure, OneLargeFlowTakesFewReadys) {
  constexpr size_t kBytes = 32 << 20;
  run_world("AB", [&](RankContext& c) {
    std::vector<float> first(1, 1.0f), all(2);
    ASSERT_TRUE(c.run(gather_of(first, all, 2)).ok());
    std::vector<char> in(kBytes, 5), out(kBytes);
    auto op = operation_of(Collective::kAllGather, 0, in, {c.rank == 0 ? kBytes : 0}, out,
                           {kBytes, 0});  // rank 1 has nothing
    auto sent = [&] {
      Engine::Lock lock = c.engine.lock();
      return c.process.network().transport()->counters().messages_sent;
    };
    uint64_t before = sent();
    Status status = c.run(op);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(out, in);
    // A rank's budget is at least 256 KiB, of which a READY allows at least a quarter.
    if (c.rank == 1) EXPECT_LT(sent() - before, kBytes / (receive_budget_bytes({}) / 4) + 10);
  });
}

// Rank 0 fills its outbox. Rank 1 reads nothing, but has pushed what rank 0 is to add to its own vector. Rank
// 0 must not sum before it has pushed that vector itself: the sums take its place.
TEST(Pressure, AnAllReduceInPlaceIsPushedBeforeItIsSummed) {
  constexpr size_t kBytes = 4 << 20;
  std::barrier both(2);
  run_world("AA",
            [&](RankContext& c) {
              std::vector<char> in(kBytes, 5), out(kBytes);
              auto gather = std::make_shared<Operation>();
              gather->collective = Collective::kAllGather;
              if (c.rank == 0) gather->input.add(in.data(), kBytes);
              gather->input.end_block();
              gather->output.add(out.data(), kBytes);
              gather->output.end_block();
              gather->output.end_block();  // rank 1 has nothing
              std::vector<float> data(100, static_cast<float>(c.rank + 1));
              auto sum = all_reduce_of(data, 2, Dtype::kFloat32, ReduceOp::kSum);
              std::this_thread::sleep_for(milliseconds(5));  // the engine's thread sleeps by now
              if (c.rank == 0) both.arrive_and_wait();
              c.group.submit(gather, {}, false);
              c.group.submit(sum, {}, false);
              if (c.rank == 1) both.arrive_and_wait();
              both.arrive_and_wait();  // rank 1 does nothing until rank 0 has looked
              for (auto& op : {gather, sum}) {
                c.engine.wait(*op);
                ASSERT_TRUE(op->status().ok()) << op->status().message();
              }
              EXPECT_EQ(out, in);
              EXPECT_EQ(data, std::vector<float>(100, 3.0f));
            },
            {.single_copy = false, .timeout_seconds = 5});
}

TEST(Pressure, AllRanksSendToOneAtOnce) {
  run_world("ABCDEFG", [](RankContext& c) {
    for (int i = 0; i < 5; ++i) {
      std::vector<int64_t> in(70'000 * 7, c.rank + i), out(70'000);
      if (c.rank == 3) std::this_thread::sleep_for(milliseconds(20));
      Status status = c.run(scatter_of(in, out, c.ranks, Dtype::kInt64, ReduceOp::kSum));
      ASSERT_TRUE(status.ok()) << status.message();
      for (int64_t x : out) ASSERT_EQ(x, 21 + 7 * i);
    }
  });
}

}  // namespace
}  // namespace smddp
