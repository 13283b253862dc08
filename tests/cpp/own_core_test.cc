// A thread that leaves its core.
#include "progress/own_core.h"

#include <gtest/gtest.h>
#include <sched.h>

#include "two_cores.h"

namespace smddp {
namespace {

cpu_set_t allowed_now() {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  return allowed;
}

TEST(Cores, AThreadThatMovesOffOneRunsOnAnotherAndMayRunOnTheSameAsBefore) {
  TwoCores cores;
  cpu_set_t before = allowed_now();
  if (!cores.take(1)) GTEST_SKIP() << "this process has one core, or may not choose";
  sched_setaffinity(0, sizeof before, &before);
  int core = sched_getcpu();
  ASSERT_TRUE(move_off(core));
  EXPECT_NE(sched_getcpu(), core);
  cpu_set_t after = allowed_now();
  EXPECT_TRUE(CPU_EQUAL(&after, &before));
}

TEST(Cores, AThreadThatMayUseOnlyOneStays) {
  TwoCores cores;
  if (!cores.take(0)) GTEST_SKIP() << "this process may not choose its core";
  cpu_set_t one = allowed_now();
  EXPECT_FALSE(move_off(sched_getcpu()));
  EXPECT_FALSE(move_off(-1));  // as sched_getcpu() says of a kernel that can't tell
  cpu_set_t after = allowed_now();
  EXPECT_TRUE(CPU_EQUAL(&after, &one));
}

}  // namespace
}  // namespace smddp
