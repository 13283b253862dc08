// The contents of a parent's arena in a forked child.
#include <sys/mman.h>
#include <sys/syscall.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "arena_blocks.h"
#include "child.h"

namespace smddp::intranode {
namespace {

TEST(ArenaFork, ChildHasItsOwnCopy) {
  Arena arena({.first_segment = 4 * kMiB});
  std::byte* small = arena.allocate(100);
  std::byte* large = arena.allocate(10 * kMiB);
  fill(small, 100, 1);
  fill(large, 10 * kMiB, 1);
  Child child([&](Child& self) {
    fill(small, 50, 7);  // does not change the parent's block
    self.send('x');
    self.receive<char>();  // the parent has written and freed
    self.send(filled(small, 50, 7) && filled(small + 50, 50, 1) && filled(large, 10 * kMiB, 1) &&
              arena.allocate(100) == nullptr && !arena.contains(small, 1) &&
              arena.table_fd() == -1 && segments_left() == 0 && arena.free(large) &&
              arena.free(small) && !arena.free(small));
  });
  child.receive<char>();
  EXPECT_TRUE(filled(small, 100, 1));
  fill(small, 100, 9);
  fill(large, 10 * kMiB, 9);
  EXPECT_TRUE(arena.free(large));
  std::byte* again = arena.allocate(10 * kMiB);
  fill(again, 10 * kMiB, 10);
  child.send('x');
  EXPECT_TRUE(child.receive<bool>());
  EXPECT_TRUE(filled(small, 100, 9));
}

TEST(ArenaFork, UntouchedBlocksGetNoPagesInTheChild) {
  Arena arena({});
  std::byte* sparse = arena.allocate(400 * kMiB);
  sparse[200 * kMiB] = std::byte{5};
  EXPECT_EQ(in_child([&] {
              std::ifstream statm("/proc/self/statm");
              size_t size, resident, shared;
              statm >> size >> resident >> shared;
              bool light = (resident - shared) * 4096 < 64 * kMiB;
              return light && sparse[200 * kMiB] == std::byte{5} && sparse[0] == std::byte{0} ? 0
                                                                                              : 1;
            }),
            0);
}

TEST(ArenaFork, BlocksBeyondTheBoundAreNotAccessible) {
  Arena arena({.first_segment = 8 * kMiB, .fork_copy = 2 * kMiB});
  std::byte* small = arena.allocate(100);
  std::byte* large = arena.allocate(4 * kMiB);
  std::byte* medium = arena.allocate(kMiB);
  fill(small, 100, 1);
  fill(medium, kMiB, 2);
  fill(large, 4 * kMiB, 3);
  EXPECT_EQ(in_child([&] { return filled(small, 100, 1) && filled(medium, kMiB, 2) ? 0 : 1; }), 0);
  EXPECT_NE(in_child([&] { return filled(large, 1, 3) ? 0 : 1; }), 0);
  EXPECT_EQ(in_child([&] { return arena.free(large) ? 0 : 1; }), 0);
  EXPECT_TRUE(filled(large, 4 * kMiB, 3));
}

TEST(ArenaFork, GrandchildrenAndManyChildren) {
  Arena arena({});
  std::byte* block = arena.allocate(kMiB);
  for (int i = 0; i < 20; ++i) {
    fill(block, kMiB, i);
    EXPECT_EQ(in_child([&] {
                fill(block, kMiB / 2, 100);
                int inner = in_child([&] {
                  bool ok = filled(block, kMiB / 2, 100) && filled(block + kMiB / 2, kMiB / 2, i);
                  fill(block, kMiB, 101);
                  return ok ? 0 : 1;
                });
                return inner == 0 && filled(block, kMiB / 2, 100) ? 0 : 1;
              }),
              0);
    EXPECT_TRUE(filled(block, kMiB, i));
  }
}

TEST(ArenaFork, ForkWhileOtherThreadsAllocate) {
  Arena arena({.first_segment = 2 * kMiB, .keep = 0});
  std::byte* block = arena.allocate(kMiB);
  fill(block, kMiB, 4);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      std::byte* other = arena.allocate(3 * kMiB);
      fill(other, 5000, 1);
      arena.free(other);
    }
  });
  for (int i = 0; i < 30; ++i) {
    pid_t pid = fork();
    if (pid == 0) _exit(filled(block, kMiB, 4) && arena.allocate(1) == nullptr ? 0 : 1);
    int status = -1;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
  stop = true;
  busy.join();
}

// A child that is made without fork()'s handlers must not have the segments.
TEST(ArenaFork, ABareCloneDoesNotHaveTheSegments) {
  Arena arena({});
  std::byte* block = arena.allocate(kMiB);
  fill(block, kMiB, 4);
  auto pid = static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
  if (pid == 0) {
    block[0] = std::byte{5};
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_NE(status, 0);
  EXPECT_TRUE(filled(block, kMiB, 4));
}

}  // namespace
}  // namespace smddp::intranode
