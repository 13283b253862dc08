// Which thread drives: the one that waits, or the background thread.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "world.h"

namespace smddp {
namespace {

using std::chrono::milliseconds;

// All threads that start while it exists share one core with a thread that computes.
class BusyCore {
 public:
  BusyCore() {
    sched_getaffinity(0, sizeof before_, &before_);
    int first = 0;
    while (!CPU_ISSET(first, &before_)) ++first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    pinned_ = sched_setaffinity(0, sizeof one, &one) == 0;
    computes_ = std::thread([this] {
      while (!stop_.load(std::memory_order_relaxed)) {
      }
    });
  }
  ~BusyCore() {
    stop_ = true;
    computes_.join();
    sched_setaffinity(0, sizeof before_, &before_);
  }
  bool pinned() const { return pinned_; }

 private:
  cpu_set_t before_;
  bool pinned_ = false;
  std::atomic<bool> stop_{false};
  std::thread computes_;
};

void gather_and_check(RankContext& c, int turn) {
  std::this_thread::sleep_for(milliseconds(2));  // as if it computed
  auto ranks = static_cast<size_t>(c.ranks);
  std::vector<int> in(5000, 100 * turn + c.rank), out(in.size() * ranks);
  Status status = c.run(gather_of(in, out, c.ranks));
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t r = 0; r < ranks; ++r)
    ASSERT_EQ(out[(r + 1) * in.size() - 1], 100 * turn + static_cast<int>(r));
}

// One rank may leave more waits to the background thread than another, so all take the same number
// of turns.
TEST(Driving, IsLeftToTheBackgroundThreadIfOtherThreadsComputeOnTheCore) {
  BusyCore core;
  if (!core.pinned()) GTEST_SKIP() << "this process may not choose its core";
  std::atomic<int> left{0};
  run_world("AB", [&](RankContext& c) {
    for (int turn = 0; turn < 100; ++turn) gather_and_check(c, turn);
    if (c.engine.waits_left_to_background() > 0) ++left;
  });
  EXPECT_GT(left, 0);
}

TEST(Driving, AWaitLeftToTheBackgroundThreadEndsWithDeadlinesAndFailures) {
  BusyCore core;
  if (!core.pinned()) GTEST_SKIP() << "this process may not choose its core";
  run_world("AB", [&](RankContext& c) {
    for (int turn = 0; turn < 50; ++turn) gather_and_check(c, turn);
    std::vector<int> in(1000), out(2000);
    auto op = gather_of(in, out, c.ranks);
    if (c.rank == 1) std::this_thread::sleep_for(milliseconds(400));
    c.group.submit(op, {}, true);
    if (c.rank == 0) EXPECT_FALSE(c.engine.wait(*op, milliseconds(50)));
    EXPECT_TRUE(c.engine.wait(*op, std::chrono::seconds(30)));
    EXPECT_TRUE(op->status().ok()) << op->status().message();

    auto never = gather_of(in, out, c.ranks);
    if (c.rank == 1) {
      std::this_thread::sleep_for(milliseconds(100));
      c.group.abort("asked to", true);
      return;
    }
    c.group.submit(never, {}, true);
    EXPECT_TRUE(c.engine.wait(*never, std::chrono::seconds(30)));
    EXPECT_FALSE(never->status().ok());
  });
}

TEST(Driving, ShutdownEndsAWaitLeftToTheBackgroundThread) {
  BusyCore core;
  if (!core.pinned()) GTEST_SKIP() << "this process may not choose its core";
  run_world("AB", [&](RankContext& c) {
    for (int turn = 0; turn < 50; ++turn) gather_and_check(c, turn);
    if (c.rank == 1) return std::this_thread::sleep_for(milliseconds(300));
    std::vector<int> in(1000), out(2000);
    auto never = gather_of(in, out, c.ranks);
    c.group.submit(never, {}, true);
    std::thread ends([&] {
      std::this_thread::sleep_for(milliseconds(100));
      c.engine.shutdown();
    });
    c.engine.wait(*never);
    EXPECT_TRUE(c.engine.ended());
    ends.join();
  });
}

}  // namespace
}  // namespace smddp
