#include "peers/flow.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace smddp
