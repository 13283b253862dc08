// How threads wait, at made-up times and without a thread: when they yield, and when they sleep.
#include "progress/wait_policy.h"

#include "debug_setting.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace smddp {
namespace {

constexpr uint64_t kMicrosecond = 1'000;
constexpr uint64_t kMillisecond = 1'000'000;
constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kSpin = 200 * kMicrosecond;

// A clock that stands still until the test moves it, and counts how often it is read.
struct Clock {
  uint64_t now = 5 * kSecond;
  int reads = 0;
  uint64_t operator()() {
    ++reads;
    return now;
  }
};

WaitPolicy inside_a_host() { return WaitPolicy(kSpin); }

WaitPolicy between_hosts() {
  WaitPolicy policy(kSpin);
  policy.expect_network();
  return policy;
}

TEST(Polls, AreManyOnlyInsideAHostWithACorePerRank) {
  EXPECT_EQ(inside_a_host().polls(), 32);
  EXPECT_EQ(between_hosts().polls(), 1);
  EXPECT_EQ(WaitPolicy(0).polls(), 1);
  WaitPolicy crowded = inside_a_host();
  crowded.expect_local_ranks(5, 4);
  EXPECT_EQ(crowded.polls(), 1);
}

TEST(Polls, TheGroupWithTheMostRanksPerCoreCounts) {
  WaitPolicy policy = inside_a_host();
  policy.expect_local_ranks(4, 4);
  EXPECT_EQ(policy.polls(), 32);
  policy.expect_local_ranks(12, 4);
  policy.expect_local_ranks(2, 4);
  EXPECT_EQ(policy.polls(), 1);
  EXPECT_EQ(policy.background_spin_ns(), 3 * 20 * kMicrosecond);
}

TEST(Polls, AnUnknownNumberOfCoresCountsAsOne) {
  WaitPolicy policy = inside_a_host();
  policy.expect_local_ranks(3, 0);
  EXPECT_EQ(policy.background_spin_ns(), 3 * 20 * kMicrosecond);
}

TEST(Spinning, TheBackgroundThreadSleepsSoonerAndBetweenHostsAtOnce) {
  EXPECT_EQ(inside_a_host().spin_ns(), kSpin);
  EXPECT_EQ(inside_a_host().background_spin_ns(), 20 * kMicrosecond);
  EXPECT_EQ(WaitPolicy(10 * kMicrosecond).background_spin_ns(), 10 * kMicrosecond);
  EXPECT_EQ(between_hosts().spin_ns(), kSpin);
  EXPECT_EQ(between_hosts().background_spin_ns(), 0u);
}

TEST(Spinning, OfTheBackgroundThreadLastsLongerWithoutAWaitObject) {
  EXPECT_EQ(between_hosts().background_polling_ns(), 100 * kMicrosecond);
  EXPECT_EQ(WaitPolicy(50 * kMicrosecond).background_polling_ns(), 50 * kMicrosecond);
}

TEST(Spinning, EndsInSleepOncePollsFoundNothingForItsTime) {
  WaitPolicy policy = inside_a_host();
  EXPECT_TRUE(policy.keeps_polling(kSecond, kSpin));
  EXPECT_TRUE(policy.keeps_polling(kSecond + kSpin - 1, kSpin));
  EXPECT_FALSE(policy.keeps_polling(kSecond + kSpin, kSpin));
}

TEST(Spinning, BeginsAgainAfterAPollThatFoundWork) {
  WaitPolicy policy = inside_a_host();
  EXPECT_TRUE(policy.keeps_polling(kSecond, kSpin));
  policy.restart_spin();
  EXPECT_TRUE(policy.keeps_polling(kSecond + kSpin, kSpin));
  EXPECT_FALSE(policy.keeps_polling(kSecond + 2 * kSpin, kSpin));
}

TEST(Spinning, WithoutTimeForItIsSleepAtOnce) {
  WaitPolicy policy = between_hosts();
  EXPECT_FALSE(policy.keeps_polling(kSecond, policy.background_spin_ns()));
}

// On a network without a wait object: polls follow one another closely while something moves, and ever less
// often while nothing does.
TEST(Pauses, AreAnEighthOfTheTimeInWhichNothingHasMoved) {
  WaitPolicy policy = between_hosts();
  EXPECT_EQ(policy.pause_ns(kSecond), 20 * kMicrosecond);
  policy.keeps_polling(kSecond, 0);
  policy.note_sleep(false, true);
  EXPECT_EQ(policy.pause_ns(kSecond + 160 * kMicrosecond), 20 * kMicrosecond);
  EXPECT_EQ(policy.pause_ns(kSecond + 800 * kMicrosecond), 100 * kMicrosecond);
  EXPECT_EQ(policy.pause_ns(kSecond + 8 * kMillisecond), kMillisecond);
  EXPECT_EQ(policy.pause_ns(2 * kSecond), kMillisecond);
}

TEST(Pauses, AreFewInALongWait) {
  WaitPolicy policy = between_hosts();
  uint64_t now = kSecond;
  int polls = 0;
  for (policy.keeps_polling(now, 0); now < kSecond + 8 * kMillisecond; ++polls) {
    now += policy.pause_ns(now);
    policy.note_sleep(false, true);
  }
  EXPECT_LT(polls, 50);
}

TEST(Pauses, AreShortAgainAfterAnEventOrWork) {
  WaitPolicy policy = between_hosts();
  for (bool event : {true, false}) {
    policy.keeps_polling(kSecond, 0);
    EXPECT_EQ(policy.pause_ns(kSecond + 8 * kMillisecond), kMillisecond);
    event ? policy.note_sleep(true, true) : policy.restart_spin();
    EXPECT_EQ(policy.pause_ns(kSecond + 8 * kMillisecond), 20 * kMicrosecond);
  }
}

TEST(Pauses, AreNotFollowedByPollsForAWhile) {
  WaitPolicy policy = between_hosts();
  EXPECT_TRUE(policy.keeps_polling(kSecond, kSpin));
  EXPECT_FALSE(policy.keeps_polling(kSecond + kSpin, kSpin));
  policy.note_sleep(false, true);
  EXPECT_FALSE(policy.keeps_polling(kSecond + kSpin + 20 * kMicrosecond, kSpin));
  policy.note_sleep(false, false);
  EXPECT_TRUE(policy.keeps_polling(kSecond + 2 * kSpin, kSpin));
}

TEST(Yields, ThatLetAnotherThreadRunAreFollowedByOneSleepInsideAHost) {
  WaitPolicy policy = inside_a_host();
  policy.note_yield(kSecond, kSecond + 2 * kMicrosecond);
  EXPECT_TRUE(policy.keeps_polling(kSecond, kSpin));
  policy.note_yield(kSecond, kSecond + 2 * kMicrosecond + 1);
  EXPECT_FALSE(policy.keeps_polling(kSecond + 1, kSpin));
  policy.restart_spin();
  EXPECT_TRUE(policy.keeps_polling(kSecond + 2, kSpin));
}

TEST(Yields, ThatLetAnotherThreadRunAreAReasonToLeaveTheCoreInsideAHost) {
  WaitPolicy policy = inside_a_host();
  uint64_t now = 5 * kSecond;
  auto yields_for = [&](uint64_t duration) {
    now += kMicrosecond;
    policy.note_yield(now - duration, now);
    (void)policy.keeps_polling(now, kSpin);
    return policy.may_leave_core(now);
  };
  EXPECT_FALSE(yields_for(kMicrosecond));
  EXPECT_TRUE(yields_for(3 * kMicrosecond));
  EXPECT_FALSE(policy.may_leave_core(now));    // asked twice after one yield
  EXPECT_FALSE(yields_for(3 * kMicrosecond));  // has just left one
  now += 6 * kMillisecond;
  EXPECT_FALSE(yields_for(kMicrosecond));
  EXPECT_TRUE(yields_for(3 * kMicrosecond));

  policy = between_hosts();
  EXPECT_FALSE(yields_for(3 * kMicrosecond));
  policy = inside_a_host();
  policy.expect_local_ranks(4, 2);
  EXPECT_FALSE(yields_for(3 * kMicrosecond));
}

TEST(Yields, OfRanksThatShareACoreOrUseTheNetworkAreFollowedByPolls) {
  WaitPolicy crowded = inside_a_host();
  crowded.expect_local_ranks(2, 1);
  WaitPolicy remote = between_hosts();
  for (WaitPolicy* policy : {&crowded, &remote}) {
    policy->note_yield(kSecond, kSecond + kMillisecond);
    EXPECT_TRUE(policy->keeps_polling(kSecond + kMillisecond, kSpin));
  }
}

TEST(Turns, EndBetweenHostsAfterTheirTimeAtWork) {
  WaitPolicy policy = between_hosts();
  Clock clock;
  EXPECT_FALSE(policy.turn_is_over(clock));
  clock.now += 299 * kMicrosecond;
  EXPECT_FALSE(policy.turn_is_over(clock));
  clock.now += kMicrosecond;
  EXPECT_TRUE(policy.turn_is_over(clock));
  EXPECT_FALSE(policy.turn_is_over(clock)) << "the next turn begins here";
  EXPECT_EQ(clock.reads, 4);
}

TEST(Turns, BeginAgainAfterAPollThatFoundNothing) {
  WaitPolicy policy = between_hosts();
  Clock clock;
  EXPECT_FALSE(policy.turn_is_over(clock));
  clock.now += 200 * kMicrosecond;
  EXPECT_TRUE(policy.keeps_polling(clock.now, kSpin));
  clock.now += 200 * kMicrosecond;
  EXPECT_FALSE(policy.turn_is_over(clock));
}

TEST(Turns, InsideAHostHaveNoEndAndReadNoClock) {
  WaitPolicy policy = inside_a_host();
  Clock clock;
  EXPECT_FALSE(policy.turn_is_over(clock));
  clock.now += kSecond;
  EXPECT_FALSE(policy.turn_is_over(clock));
  EXPECT_EQ(clock.reads, 0);
}

TEST(Environment, SetsTheTimeToSpin) {
  EXPECT_EQ(WaitPolicy::from_env().spin_ns(), kSpin);
  DebugSetting set("spin_microseconds", "50");
  EXPECT_EQ(WaitPolicy::from_env().spin_ns(), 50 * kMicrosecond);
  DebugSetting wrong("spin_microseconds", "-1");
  EXPECT_EQ(WaitPolicy::from_env().spin_ns(), 0u);
}

}  // namespace
}  // namespace smddp
