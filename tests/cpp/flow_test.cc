#include "flows/flow.h"

#include <gtest/gtest.h>

#include <deque>
#include <numeric>
#include <random>

namespace smddp {
namespace {

TEST(Coverage, GrowsByPiecesThatTouchItsEnd) {
  Coverage c(10);
  EXPECT_TRUE(c.add(4, 2));
  EXPECT_EQ(c.prefix(), 0u);
  EXPECT_TRUE(c.add(0, 4));
  EXPECT_EQ(c.prefix(), 6u);
  EXPECT_TRUE(c.add(6, 4));
  EXPECT_TRUE(c.complete());
}

TEST(Coverage, RefusesBytesThatAreOutsideOrThereAlready) {
  Coverage c(10);
  EXPECT_FALSE(c.add(11, 0));
  EXPECT_FALSE(c.add(0, 11));
  EXPECT_FALSE(c.add(UINT64_MAX, 2));
  EXPECT_FALSE(c.add(2, UINT64_MAX));
  EXPECT_TRUE(c.add(3, 3));
  EXPECT_FALSE(c.add(3, 3));
  EXPECT_FALSE(c.add(5, 2));
  EXPECT_FALSE(c.add(2, 2));
  EXPECT_FALSE(c.add(0, 10));
  EXPECT_TRUE(c.add(0, 3));
  EXPECT_FALSE(c.add(5, 1));
  EXPECT_EQ(c.prefix(), 6u);
}

TEST(Coverage, AnyOrderOfAnyPiecesCompletesIt) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    size_t size = random() % 200;
    std::vector<std::pair<size_t, size_t>> pieces;
    for (size_t at = 0; at < size;) {
      size_t n = std::min<size_t>(size - at, 1 + random() % 20);
      pieces.emplace_back(at, n);
      at += n;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    Coverage c(size);
    std::vector<bool> there(size);
    for (auto [at, n] : pieces) {
      EXPECT_FALSE(c.complete());
      EXPECT_TRUE(c.add(at, n));
      EXPECT_FALSE(c.add(at, n));
      std::fill_n(there.begin() + static_cast<std::ptrdiff_t>(at), n, true);
      auto gap = std::find(there.begin(), there.end(), false);
      EXPECT_EQ(c.prefix(), static_cast<size_t>(gap - there.begin()));
    }
    EXPECT_TRUE(c.complete());
  }
}

// More bytes arrive than were opened only if a peer's figures are wrong: the room stays what it may be.
TEST(ReceiveBudget, NeverHasMoreRoomThanItsBytes) {
  ReceiveBudget budget(100);
  budget.open(70);
  EXPECT_EQ(budget.left(), 30u);
  budget.close(80);
  EXPECT_EQ(budget.left(), 100u);
  budget.open(100);
  EXPECT_EQ(budget.left(), 0u);
}

// Writes start in order and complete in any: a byte counts as complete only if all before it are.
TEST(WriteBatches, CountOnlyBytesWithoutAGap) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    WriteBatches batches;
    std::vector<uint32_t*> counters;  // of the writes in flight, in order; nullptr: complete
    std::vector<bool> done;
    size_t sent = 0, told = 0;
    for (int step = 0; step < 300; ++step) {
      if (random() % 2 == 0) {
        counters.push_back(batches.pending());
        ++*counters.back();
        done.push_back(false);
        sent += 10;
      } else if (!counters.empty()) {
        size_t i = counters.size() - 1 - random() % std::min<size_t>(counters.size(), 12);
        if (!done[i]) --*counters[i];
        done[i] = true;
      }
      size_t gap = static_cast<size_t>(std::find(done.begin(), done.end(), false) - done.begin());
      size_t completed = batches.completed(sent);
      EXPECT_LE(completed, gap * 10);
      EXPECT_GE(completed, told);
      told = completed;
    }
    for (size_t i = 0; i < done.size(); ++i) {
      if (!done[i]) --*counters[i];
    }
    EXPECT_TRUE(batches.idle());
    EXPECT_EQ(batches.completed(sent), sent);
  }
}

// What completes in order is known at once, while seven writes or fewer are under way.
TEST(WriteBatches, CountEachOfFewWrites) {
  WriteBatches batches;
  std::deque<uint32_t*> counters;
  size_t sent = 0;
  for (int write = 0; write < 100; ++write) {
    if (counters.size() == 7) {
      --*counters.front();
      counters.pop_front();
      EXPECT_EQ(batches.completed(sent), sent - 60);
    }
    counters.push_back(batches.pending());
    ++*counters.back();
    sent += 10;
    batches.completed(sent);
  }
}

TEST(ShardRun, FindsTheShardsOfARange) {
  ShardRun s;
  s.add(7, 10);
  s.add(2, 0);
  s.add(5, 6);
  EXPECT_EQ(s.bytes(), 16u);
  std::vector<std::array<size_t, 4>> seen;
  s.for_each(8, 5, [&](Rank shard, size_t at, size_t n, size_t from) {
    seen.push_back({static_cast<size_t>(shard), at, n, from});
  });
  EXPECT_EQ(seen, (std::vector<std::array<size_t, 4>>{{7, 8, 2, 0}, {5, 0, 3, 2}}));
}

TEST(FlowList, FindsTheFlowOfARankAndNoneOfOthers) {
  FlowList<SendFlow> flows;
  EXPECT_EQ(flows.find(7), nullptr);
  for (Rank rank : {7, 3, 4000, 5}) flows.emplace_back().target = rank;
  flows.index();
  for (SendFlow& flow : flows) EXPECT_EQ(flows.find(flow.target), &flow);
  for (Rank other : {0, 4, 6, 8, 4001}) EXPECT_EQ(flows.find(other), nullptr);
}

}  // namespace
}  // namespace smddp
