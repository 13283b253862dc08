#include "collectives/selector.h"

#include <gtest/gtest.h>

namespace smddp {
namespace {

TEST(Selector, OneRoundWithoutABucket) {
  EXPECT_EQ(select({Collective::kAllGather, 1 << 30, 4}, {8, 1, true}, {}).round_bytes, 1u << 30);
  EXPECT_EQ(select({Collective::kReduceScatter, 1 << 30, 4}, {8, 1, true}, {}).round_bytes,
            1u << 30);
}

TEST(Selector, AllGatherBucketBoundsTheOutputOfARound) {
  for (int ranks : {1, 2, 3, 7, 8, 1000}) {
    for (size_t bucket : {4096ul, 100000ul, 1ul << 20, 500000000ul}) {
      Plan plan = select({Collective::kAllGather, 1 << 28, 2}, {ranks, 1, true},
                         {.allgather_bucket_bytes = bucket});
      EXPECT_LE(plan.round_bytes * static_cast<size_t>(ranks),
                std::max<size_t>(bucket, 2 * static_cast<size_t>(ranks)));
      EXPECT_EQ(plan.round_bytes % 2, 0u);
      EXPECT_GT(plan.round_bytes, 0u);
    }
  }
}

TEST(Selector, BucketInElementsCountsTheElementType) {
  Tuning tuning{.allgather_bucket_elements = 1 << 20};
  EXPECT_EQ(select({Collective::kAllGather, 1 << 28, 4}, {4, 1, true}, tuning).round_bytes,
            1u << 20);
  EXPECT_EQ(select({Collective::kAllGather, 1 << 28, 2}, {4, 1, true}, tuning).round_bytes,
            1u << 19);
}

TEST(Selector, TheSmallerBucketHolds) {
  Tuning tuning{.allgather_bucket_bytes = 1 << 16, .allgather_bucket_elements = 1 << 20};
  EXPECT_EQ(select({Collective::kAllGather, 1 << 28, 4}, {4, 1, true}, tuning).round_bytes,
            1u << 14);
}

TEST(Selector, ABucketSmallerThanOneElementEachStillMoves) {
  Tuning tuning{.allgather_bucket_bytes = 3};
  EXPECT_EQ(select({Collective::kAllGather, 1 << 20, 8}, {64, 8, true}, tuning).round_bytes, 8u);
}

TEST(Selector, PartialSumsOfManyNodesStayBounded) {
  for (int nodes : {2, 3, 16, 1024}) {
    Plan plan = select({Collective::kReduceScatter, 1ul << 30, 2}, {8 * nodes, nodes, true}, {});
    EXPECT_LE(plan.round_bytes * static_cast<size_t>(nodes - 1),
              std::max<size_t>(4 << 20, (64ul << 10) * static_cast<size_t>(nodes)));
  }
}

TEST(Selector, EmptyOperationsHaveARound) {
  EXPECT_EQ(select({Collective::kAllGather, 0, 4}, {4, 2, true}, {}).round_bytes, 4u);
}

TEST(Selector, LargeRoundsAreReadDirectlyWhereThatIsAllowed) {
  EXPECT_FALSE(read_directly(1 << 10, {4, 1, true}));
  EXPECT_TRUE(read_directly(1 << 20, {4, 1, true}));
  EXPECT_FALSE(read_directly(1 << 20, {4, 1, false}));
}

}  // namespace
}  // namespace smddp
