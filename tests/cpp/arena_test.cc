#include "intranode/arena.h"

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "arena_blocks.h"

namespace smddp::intranode {
namespace {

TEST(Arena, BlocksNeverOverlapAndAreAligned) {
  std::mt19937 random(7);
  Arena arena({.first_segment = 4 * kMiB, .largest_growth = 16 * kMiB, .keep = 2 * kMiB});
  struct Mine {
    size_t bytes;
    int value;
  };
  std::map<std::byte*, Mine> live;
  size_t bytes_live = 0;
  for (int turn = 0; turn < 10000; ++turn) {
    bool more = bytes_live < 24 * kMiB ? random() % 5 < 3 : random() % 5 < 1;
    if (more) {
      size_t scale = size_t{1} << random() % 21;
      size_t bytes = random() % scale + (random() % 50 == 0 ? 0 : 1);
      std::byte* block = arena.allocate(bytes);
      ASSERT_NE(block, nullptr);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(block) % (bytes < 4096 ? 64 : 4096), 0u);
      auto next = live.lower_bound(block);
      if (next != live.end()) {
        ASSERT_LE(block + bytes, next->first);
      }
      if (next != live.begin()) {
        ASSERT_GE(block, std::prev(next)->first + std::prev(next)->second.bytes);
      }
      int value = static_cast<int>(random() % 256);
      fill(block, bytes, value);
      if (bytes == 0) {
        EXPECT_TRUE(arena.free(block));
        continue;
      }
      ASSERT_TRUE(arena.contains(block, bytes));
      live[block] = {bytes, value};
      bytes_live += bytes;
    } else if (!live.empty()) {
      auto it = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      ASSERT_TRUE(filled(it->first, it->second.bytes, it->second.value));
      ASSERT_TRUE(arena.free(it->first));
      bytes_live -= it->second.bytes;
      live.erase(it);
    }
    auto s = arena.statistics();
    ASSERT_EQ(s.blocks, live.size());
    ASSERT_GE(s.in_use, bytes_live);
    ASSERT_LE(s.in_use + s.kept, s.reserved);
    ASSERT_LE(s.kept, 2 * kMiB + 4096 * live.size() + 4096);
  }
  for (auto& [block, mine] : live) {
    ASSERT_TRUE(filled(block, mine.bytes, mine.value));
    ASSERT_TRUE(arena.free(block));
  }
  arena.trim();
  EXPECT_EQ(arena.statistics().segments, 0u);
  EXPECT_EQ(arena.statistics().reserved, 0u);
  EXPECT_EQ(arena.statistics().kept, 0u);
}

TEST(Arena, AdjacentFreeRunsMerge) {
  Arena arena({.first_segment = 4 * kMiB, .keep = 64 * kMiB});
  std::byte* blocks[4];
  for (auto& block : blocks) block = arena.allocate(kMiB);
  EXPECT_EQ(arena.statistics().segments, 1u);
  for (int i : {0, 2, 1, 3}) EXPECT_TRUE(arena.free(blocks[i]));
  std::byte* whole = arena.allocate(4 * kMiB);
  EXPECT_NE(whole, nullptr);
  EXPECT_EQ(arena.statistics().segments, 1u);
  EXPECT_TRUE(arena.free(whole));
}

TEST(Arena, RefusesForeignAddressesAndImpossibleSizes) {
  Arena arena({});
  std::byte* block = arena.allocate(100);
  int other = 0;
  EXPECT_FALSE(arena.free(nullptr));
  EXPECT_FALSE(arena.free(&other));
  EXPECT_FALSE(arena.free(block + 64));
  EXPECT_FALSE(arena.contains(&other, 1));
  EXPECT_FALSE(arena.contains(block, SIZE_MAX));
  EXPECT_TRUE(arena.free(block));
  EXPECT_FALSE(arena.free(block));
  EXPECT_EQ(arena.allocate(SIZE_MAX), nullptr);
  EXPECT_EQ(arena.allocate(SIZE_MAX / 2), nullptr);
  EXPECT_EQ(arena.statistics().refused, 2u);
}

TEST(Arena, GrowsAndShrinks) {
  {
    Arena arena({.first_segment = 2 * kMiB, .largest_growth = 8 * kMiB, .keep = 3 * kMiB});
    std::vector<std::byte*> blocks;
    for (int i = 0; i < 30; ++i) {
      blocks.push_back(arena.allocate(kMiB));
      fill(blocks.back(), kMiB, i);
    }
    auto s = arena.statistics();
    EXPECT_EQ(s.in_use, 30 * kMiB);
    EXPECT_EQ(s.segments, 6u);  // 2, 2, 4, 8, 8, 8
    std::byte* large = arena.allocate(20 * kMiB + 1);
    EXPECT_EQ(arena.statistics().segments, 7u);
    EXPECT_EQ(arena.statistics().reserved - s.reserved, 22 * kMiB);
    EXPECT_TRUE(arena.free(large));  // exceeds `keep`: released at once
    EXPECT_EQ(arena.statistics().segments, 6u);
    for (std::byte* block : blocks) EXPECT_TRUE(arena.free(block));
    EXPECT_LE(arena.statistics().kept, 3 * kMiB);
    EXPECT_LE(arena.statistics().segments, 3u);
    arena.trim();
    EXPECT_EQ(arena.statistics().segments, 0u);
    EXPECT_EQ(arena.statistics().peak, 50 * kMiB + 4096);
    EXPECT_EQ(segments_left(), 2);  // the table's mapping and its descriptor
  }
  EXPECT_EQ(segments_left(), 0);
}

TEST(Arena, FreedPagesOfSegmentsInUseAreGivenBack) {
  Arena arena({.first_segment = 32 * kMiB, .keep = 0, .huge_pages = false});
  std::byte* large = arena.allocate(16 * kMiB);
  std::byte* small = arena.allocate(100);
  fill(large, 16 * kMiB, 1);
  fill(small, 100, 2);
  struct stat info;
  auto blocks_of_memfd = [&] {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      auto target = std::filesystem::read_symlink(entry, gone).string();
      if (target.find("memfd:smddp-arena") == std::string::npos) continue;
      if (stat(entry.path().c_str(), &info) == 0 && info.st_size == 32 * kMiB)
        return static_cast<size_t>(info.st_blocks) * 512;
    }
    return size_t{0};
  };
  EXPECT_GE(blocks_of_memfd(), 16 * kMiB);
  EXPECT_TRUE(arena.free(large));
  EXPECT_LE(blocks_of_memfd(), 8192u);
  EXPECT_TRUE(filled(small, 100, 2));
}

TEST(Arena, ManyThreadsAllocateAndFree) {
  Arena arena({.first_segment = 4 * kMiB, .keep = kMiB});
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<std::pair<std::byte*, size_t>> mine;
      for (int i = 0; i < 2000; ++i) {
        size_t bytes = random() % 40000 + 1;
        std::byte* block = arena.allocate(bytes);
        fill(block, bytes, t);
        mine.emplace_back(block, bytes);
        if (mine.size() < 20) continue;
        std::swap(mine[random() % mine.size()], mine.back());
        wrong += !filled(mine.back().first, mine.back().second, t);
        wrong += !arena.free(mine.back().first);
        mine.pop_back();
      }
      for (auto [block, bytes] : mine) wrong += !arena.free(block);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(arena.statistics().in_use, 0u);
}

}  // namespace
}  // namespace smddp::intranode
