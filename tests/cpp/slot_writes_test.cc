// The decision whether an outbox writes its slots past the caches, with invented durations.
#include "intranode/slot_writes.h"

#include <gtest/gtest.h>

namespace smddp::intranode {
namespace {

constexpr size_t kBytes = 32 << 10;
constexpr uint64_t kFast = 1'000, kSlow = 12'000;  // ns; a write past the caches takes 800

class Writes {
 public:
  // Makes `count` writes, which take `ns` through the caches. Returns how many go past the caches.
  int make(int count, uint64_t ns) {
    int past = 0;
    for (int i = 0; i < count; ++i) {
      bool timed = choice_.is_timed();
      past += choice_.streaming() && !timed ? 1 : 0;
      if (timed) choice_.took(kBytes, ns);
    }
    return past;
  }

 private:
  SlotWrites choice_{800.0 / kBytes};
};

TEST(SlotWrites, GoThroughTheCachesWhileThatIsFast) { EXPECT_EQ(Writes().make(1000, kFast), 0); }

TEST(SlotWrites, GoPastTheCachesSoonAfterWritesThroughThemAreSlow) {
  EXPECT_GT(Writes().make(100, kSlow), 80);
}

TEST(SlotWrites, ReturnToTheCachesWhenTheyAreFastAgain) {
  Writes writes;
  writes.make(1000, kSlow);
  writes.make(1000, kFast);
  EXPECT_EQ(writes.make(100, kFast), 0);
}

TEST(SlotWrites, OneSlowWriteDoesNotChangeTheDecision) {
  Writes writes;
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(writes.make(4, 4'000'000), 0);  // one of them is timed
    EXPECT_EQ(writes.make(16, kFast), 0);
  }
}

TEST(SlotWrites, SmallPiecesAreWrittenThroughTheCaches) {
  SlotWrites choice(1e-9);  // any write is slow
  for (int i = 0; i < 100; ++i) choice.run(kBytes, [](bool) {});
  ASSERT_TRUE(choice.streaming());
  bool streamed = false;
  for (int i = 0; i < 100; ++i)
    choice.run(SlotWrites::kLeast - 1, [&](bool past) { streamed = streamed || past; });
  EXPECT_FALSE(streamed);
}

}  // namespace
}  // namespace smddp::intranode
