// For whom the callers of a rank waited, and who is not to blame.
#include "flows/peer_tallies.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace smddp {
namespace {

using Seen = std::vector<std::pair<Rank, uint64_t>>;  // ranks, when their start was seen

// What rank 0 counts as late, by rank, in an operation that it waited for from `waited_from` on.
std::vector<uint64_t> late(int ranks, const Seen& seen, uint64_t waited_from, Rank not_own = -1) {
  Starts starts;
  PeerTallies tallies(ranks);
  starts.begin(ranks);
  for (Rank rank = 1; rank < ranks; ++rank) starts.await(rank);
  for (auto [rank, at] : seen) {
    EXPECT_TRUE(starts.is_unseen(rank));
    starts.seen(rank, at, rank != not_own);
  }
  starts.count(tallies, waited_from);
  std::vector<uint64_t> found;
  for (const PeerTally& tally : tallies.all()) {
    EXPECT_EQ(tally.late, tally.late_ns > 0 ? 1u : 0u);
    found.push_back(tally.late_ns);
  }
  return found;
}

using Late = std::vector<uint64_t>;

TEST(PeerTallies, ARankIsLateByTheTimeAfterHalfOfTheRanks) {
  EXPECT_EQ(late(2, {{1, 500}}, 100), (Late{0, 400}));
  EXPECT_EQ(late(4, {{3, 150}, {1, 200}, {2, 900}}, 100), (Late{0, 50, 750, 0}));
  EXPECT_EQ(late(5, {{3, 150}, {1, 200}, {2, 900}, {4, 910}}, 100), (Late{0, 0, 700, 0, 710}));
}

TEST(PeerTallies, NobodyIsLateIfThisRankIsTheLateOne) {
  EXPECT_EQ(late(4, {{1, 0}, {2, 0}, {3, 0}}, 100), (Late{0, 0, 0, 0}));
}

TEST(PeerTallies, OnlyTimeInWhichACallerWaitsCounts) {
  EXPECT_EQ(late(2, {{1, 500}}, 0), (Late{0, 0}));
  EXPECT_EQ(late(2, {{1, 500}}, 450), (Late{0, 50}));
  EXPECT_EQ(late(2, {{1, 500}}, 600), (Late{0, 0}));
}

TEST(PeerTallies, ARankThatMayHaveWaitedForAnotherOneIsNotLate) {
  EXPECT_EQ(late(4, {{3, 0}, {1, 800}, {2, 900}}, 100, 2), (Late{0, 700, 0, 0}));
}

TEST(PeerTallies, AStartThatNobodyAwaitsIsNoneToSee) {
  Starts starts;
  EXPECT_FALSE(starts.is_unseen(1));
  starts.begin(4);
  starts.await(2);
  starts.await(2);  // once as a sender, once in the host
  EXPECT_FALSE(starts.is_unseen(1));
  starts.seen(2, 7);
  EXPECT_FALSE(starts.any_unseen());
}

}  // namespace
}  // namespace smddp
