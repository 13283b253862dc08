#include "intranode/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "intranode/peer_memory.h"
#include "intranode/presence.h"

namespace smddp::intranode {
namespace {

constexpr size_t kMiB = 1 << 20;

// Lines of /proc/self/maps and descriptors of this process that belong to an arena's segments.
int segments_left() {
  int found = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    found += line.find("memfd:smddp-arena") != std::string::npos;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    auto target = std::filesystem::read_symlink(entry, gone);
    found += target.string().find("smddp-arena") != std::string::npos;
  }
  return found;
}

void fill(std::byte* block, size_t bytes, int value) { std::memset(block, value, bytes); }

bool filled(const std::byte* block, size_t bytes, int value) {
  for (size_t i = 0; i < bytes; ++i) {
    if (block[i] != static_cast<std::byte>(value)) return false;
  }
  return true;
}

// Runs `body` in a forked child and says how that ended: its result, or minus the signal.
int in_child(const std::function<int()>& body) {
  pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

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

TEST(Arena, FreeRunsGrowTogether) {
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

TEST(Arena, RefusesWhatIsNotItsOwn) {
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
    EXPECT_TRUE(arena.free(large));  // beyond `keep`: gone at once
    EXPECT_EQ(arena.statistics().segments, 6u);
    for (std::byte* block : blocks) EXPECT_TRUE(arena.free(block));
    EXPECT_LE(arena.statistics().kept, 3 * kMiB);
    EXPECT_LE(arena.statistics().segments, 3u);
    arena.trim();
    EXPECT_EQ(arena.statistics().segments, 0u);
    EXPECT_EQ(arena.statistics().peak, 50 * kMiB + 4096);
    EXPECT_EQ(segments_left(), 2);  // the table, mapped and open
  }
  EXPECT_EQ(segments_left(), 0);
}

TEST(Arena, FreedPagesGoBackFromSegmentsInUse) {
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

TEST(Arena, TakesManyThreads) {
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

// --- what neighbours see -------------------------------------------------------------------------

// A neighbour: a forked child with an arena of its own, told what to do over a pipe.
class Owner {
 public:
  // `body(say, hear)`: say() sends a word to the test, hear() waits for one.
  using Say = std::function<void(uint64_t)>;
  using Hear = std::function<uint64_t()>;
  explicit Owner(const std::function<void(const Say&, const Hear&)>& body) {
    EXPECT_EQ(pipe(up_), 0);
    EXPECT_EQ(pipe(down_), 0);
    pid_ = fork();
    if (pid_ != 0) {
      ::close(up_[1]);
      ::close(down_[0]);
      return;
    }
    ::close(up_[0]);
    ::close(down_[1]);
    body([&](uint64_t word) { [[maybe_unused]] auto n = write(up_[1], &word, sizeof word); },
         [&] {
           uint64_t word = 0;
           if (read(down_[0], &word, sizeof word) != sizeof word) _exit(1);
           return word;
         });
    _exit(0);
  }
  ~Owner() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    ::close(up_[0]);
    ::close(down_[1]);
  }
  void say(uint64_t word) { EXPECT_EQ(write(down_[1], &word, sizeof word), 8); }
  uint64_t hear() {
    uint64_t word = 0;
    EXPECT_EQ(read(up_[0], &word, sizeof word), 8);
    return word;
  }
  std::byte* hear_address() { return reinterpret_cast<std::byte*>(hear()); }
  std::unique_ptr<PeerMemory> memory() {
    auto peer = PeerMemory::open(pid_, static_cast<int>(hear()));
    EXPECT_TRUE(peer.ok()) << peer.status().message();
    return peer ? std::move(peer.value()) : nullptr;
  }
  int pid() const { return pid_; }

 private:
  int up_[2], down_[2];
  pid_t pid_;
};

uint64_t word(const void* address) { return reinterpret_cast<uint64_t>(address); }

TEST(PeerMemory, ReadsAndWritesTheOwnersBlocks) {
  Owner owner([](const auto& say, const auto& hear) {
    Arena arena({.first_segment = 2 * kMiB});
    say(static_cast<uint64_t>(arena.table_fd()));
    for (size_t bytes : {size_t{1000}, 3 * kMiB, 100 * kMiB}) {
      std::byte* block = arena.allocate(bytes);
      fill(block, bytes, 0x5a);
      say(word(block));
      hear();  // the test has read and written
      say(filled(block, 500, 0x11) && filled(block + 500, bytes - 500, 0x5a));
    }
    hear();
  });
  auto peer = owner.memory();
  ASSERT_NE(peer, nullptr);
  for (size_t bytes : {size_t{1000}, 3 * kMiB, 100 * kMiB}) {
    std::byte* theirs = owner.hear_address();
    std::byte* here = peer->find(theirs, bytes);
    ASSERT_NE(here, nullptr);
    EXPECT_EQ(peer->find(theirs + 10, bytes - 10), here + 10);
    EXPECT_TRUE(filled(here, bytes, 0x5a));
    fill(here, 500, 0x11);
    owner.say(1);
    EXPECT_EQ(owner.hear(), 1u);
    EXPECT_EQ(peer->find(theirs, size_t{1} << 40), nullptr);
    EXPECT_EQ(peer->find(theirs, SIZE_MAX), nullptr);
  }
  EXPECT_EQ(peer->mapped(), 3u);
  EXPECT_EQ(peer->find(nullptr, 1), nullptr);
  EXPECT_EQ(peer->find(reinterpret_cast<std::byte*>(UINTPTR_MAX), SIZE_MAX), nullptr);
}

TEST(PeerMemory, ForgetsSegmentsThatAreGone) {
  Owner owner([](const auto& say, const auto& hear) {
    Arena arena({.first_segment = 2 * kMiB, .keep = 0});
    say(static_cast<uint64_t>(arena.table_fd()));
    // The kernel gives the next segment of the same size the same address, and the same number.
    for (int i = 1; i <= 5; ++i) {
      std::byte* block = arena.allocate(2 * kMiB);
      fill(block, 2 * kMiB, i);
      say(word(block));
      hear();
      arena.free(block);
      say(0);
      hear();
    }
  });
  auto peer = owner.memory();
  ASSERT_NE(peer, nullptr);
  std::byte* before = nullptr;
  int same_address = 0;
  for (int i = 1; i <= 5; ++i) {
    std::byte* theirs = owner.hear_address();
    same_address += theirs == before;
    before = theirs;
    std::byte* here = peer->find(theirs, 2 * kMiB);
    ASSERT_NE(here, nullptr);
    EXPECT_TRUE(filled(here, 2 * kMiB, i));
    owner.say(1);
    owner.hear();
    EXPECT_EQ(peer->find(theirs, 1), nullptr);
    EXPECT_EQ(peer->mapped(), 0u);
    owner.say(1);
  }
  EXPECT_GT(same_address, 0);
}

TEST(PeerMemory, OutlivesItsOwnerAndLeavesNothing) {
  {
    std::unique_ptr<PeerMemory> peer;
    std::byte *theirs, *unseen;
    {
      Owner owner([](const auto& say, const auto& hear) {
        Arena arena({});
        say(static_cast<uint64_t>(arena.table_fd()));
        std::byte* block = arena.allocate(kMiB);
        fill(block, kMiB, 3);
        say(word(block));
        say(word(arena.allocate(200 * kMiB)));
        hear();
      });
      peer = owner.memory();
      theirs = owner.hear_address();
      unseen = owner.hear_address();
      ASSERT_NE(peer->find(theirs, kMiB), nullptr);
    }  // killed
    std::byte* here = peer->find(theirs, kMiB);
    ASSERT_NE(here, nullptr);
    EXPECT_TRUE(filled(here, kMiB, 3));
    EXPECT_EQ(peer->find(unseen, kMiB), nullptr);
    EXPECT_EQ(peer->find(unseen, kMiB), nullptr);
  }
  EXPECT_EQ(segments_left(), 0);
}

TEST(PeerMemory, ReportsWhatCannotBeOpened) {
  EXPECT_FALSE(PeerMemory::open(getpid(), -1).ok());
  EXPECT_FALSE(PeerMemory::open(getpid(), 1 << 20).ok());
  EXPECT_FALSE(PeerMemory::open(1 << 30, 0).ok());
  Fd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_FALSE(PeerMemory::open(getpid(), null.get()).ok());
  auto unsealed = create_shared("smddp-test", 1 << 20);
  ASSERT_TRUE(unsealed.ok());
  EXPECT_FALSE(PeerMemory::open(getpid(), unsealed.value().fd.get()).ok());
}

// A table that a broken or hostile neighbour wrote.
struct ForgedTable {
  ForgedTable() {
    fd = Fd(memfd_create("smddp-forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(fd.get(), 1 << 16), 0);
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    mapping =
        Mapping(mmap(nullptr, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), 1 << 16);
    table()->magic = kArenaMagic;
  }
  ArenaTable* table() const { return static_cast<ArenaTable*>(mapping.address()); }
  Fd fd;
  Mapping mapping;
};

TEST(PeerMemory, SurvivesGarbage) {
  ForgedTable forged;
  auto peer = PeerMemory::open(getpid(), forged.fd.get());
  ASSERT_TRUE(peer.ok());
  std::mt19937_64 random(3);
  const uint64_t telling[] = {0,          1,    4096, UINT64_MAX,        UINT64_MAX - 4095,
                              1ull << 63, 2048, 8192, UINT64_C(1) << 47, 2,
                              3,          7};
  for (int turn = 0; turn < 1000; ++turn) {
    forged.table()->used = static_cast<uint32_t>(random());
    for (ArenaEntry& entry : forged.table()->entries) {
      for (auto* field :
           {&entry.version, &entry.base, &entry.bytes, &entry.device, &entry.inode, &entry.fd}) {
        *field = random() % 2 == 0 ? telling[random() % std::size(telling)] : random();
      }
      entry.version.fetch_and(turn % 3 == 0 ? ~0ull : ~1ull);
      if (turn % 50 != 0) break;
    }
    forged.table()->epoch = random();
    for (uint64_t address : telling) {
      for (size_t bytes : {size_t{0}, size_t{1}, size_t{4096}, SIZE_MAX}) {
        ASSERT_EQ(peer.value()->find(reinterpret_cast<std::byte*>(address), bytes), nullptr);
      }
    }
  }
  EXPECT_EQ(peer.value()->mapped(), 0u);
}

TEST(PeerMemory, RefusesAnotherFileBehindTheNumber) {
  Arena arena({.huge_pages = false});
  std::byte* block = arena.allocate(kMiB);
  ForgedTable forged;
  auto real = PeerMemory::open(getpid(), arena.table_fd());
  ASSERT_TRUE(real.ok());
  fill(block, kMiB, 9);
  std::byte* alias = real.value()->find(block, kMiB);
  ASSERT_NE(alias, nullptr);
  EXPECT_NE(alias, block);
  EXPECT_TRUE(filled(alias, kMiB, 9));

  Fd shrinkable(memfd_create("smddp-forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(shrinkable.get(), 1 << 20), 0);
  struct stat info;
  ASSERT_EQ(fstat(shrinkable.get(), &info), 0);
  ArenaEntry& entry = forged.table()->entries[0];
  forged.table()->used = 1;
  entry.base = 1 << 20;
  entry.device = info.st_dev;
  entry.inode = info.st_ino;
  entry.fd = static_cast<uint64_t>(shrinkable.get());
  auto peer = PeerMemory::open(getpid(), forged.fd.get());
  auto* there = reinterpret_cast<std::byte*>(1 << 20);
  auto find_with = [&](uint64_t bytes) {
    entry.version += 2;
    entry.bytes = bytes;
    ++forged.table()->epoch;
    return peer.value()->find(there, 4096);
  };
  EXPECT_EQ(find_with(1 << 20), nullptr) << "not sealed";
  ASSERT_EQ(fcntl(shrinkable.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(find_with(2 << 20), nullptr) << "too short";
  EXPECT_NE(find_with(1 << 20), nullptr);
  entry.inode += 1;
  EXPECT_EQ(find_with(1 << 20), nullptr) << "another file";
  entry.inode -= 1;
  entry.version += 1;
  ++forged.table()->epoch;
  EXPECT_EQ(peer.value()->find(there, 4096), nullptr) << "being changed";
  entry.version += 1;
  EXPECT_NE(peer.value()->find(there, 4096), nullptr) << "the change is over";
}

TEST(PeerMemory, FollowsAnArenaThatChanges) {
  Arena arena({.first_segment = 2 * kMiB, .largest_growth = 2 * kMiB, .keep = 0});
  auto peer = PeerMemory::open(getpid(), arena.table_fd());
  ASSERT_TRUE(peer.ok());
  std::atomic<std::byte*> published{nullptr};
  std::thread owner([&] {
    std::mt19937 random(5);
    for (int i = 0; i < 1000; ++i) {
      size_t bytes = (random() % 8 + 1) * kMiB;
      std::byte* block = arena.allocate(bytes);
      block[bytes - 1] = static_cast<std::byte>(i);
      block[0] = static_cast<std::byte>(i);
      published.store(block, std::memory_order_release);
      while (published.load(std::memory_order_acquire) != nullptr) std::this_thread::yield();
      arena.free(block);
    }
  });
  int missing = 0, wrong = 0;
  for (int i = 0; i < 1000; ++i) {
    std::byte* theirs;
    while ((theirs = published.load(std::memory_order_acquire)) == nullptr)
      std::this_thread::yield();
    std::byte* here = peer.value()->find(theirs, kMiB);
    missing += here == nullptr;
    if (here != nullptr) wrong += *here != static_cast<std::byte>(i);
    published.store(nullptr, std::memory_order_release);
  }
  owner.join();
  EXPECT_EQ(missing, 0);
  EXPECT_EQ(wrong, 0);
}

TEST(Presence, TellsOfTheProcessArena) {
  auto presence = Presence::create();
  ASSERT_TRUE(presence.ok());
  Presence& p = *presence.value();
  auto neighbor = Neighbor::open(getpid(), p.token(), p.presence_fd(), p.doorbell_fd());
  ASSERT_TRUE(neighbor.ok());
  std::byte* block = Arena::process().allocate(5000);
  block[4999] = std::byte{7};
  std::byte* found = neighbor.value()->find(block, 5000);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found[4999], std::byte{7});
  EXPECT_EQ(neighbor.value()->find(reinterpret_cast<std::byte*>(&block), 8), nullptr);
  EXPECT_TRUE(Arena::process().free(block));
}

// --- fork ----------------------------------------------------------------------------------------

TEST(ArenaFork, ChildHasItsOwnCopy) {
  Arena arena({.first_segment = 4 * kMiB});
  std::byte* small = arena.allocate(100);
  std::byte* large = arena.allocate(10 * kMiB);
  fill(small, 100, 1);
  fill(large, 10 * kMiB, 1);
  int go[2], done[2];
  ASSERT_EQ(pipe(go), 0);
  ASSERT_EQ(pipe(done), 0);
  pid_t pid = fork();
  if (pid == 0) {
    char byte;
    fill(small, 50, 7);  // not the parent's
    [[maybe_unused]] auto n = write(done[1], "x", 1);
    n = read(go[0], &byte, 1);  // the parent has written and freed
    bool ok = filled(small, 50, 7) && filled(small + 50, 50, 1) && filled(large, 10 * kMiB, 1) &&
              arena.allocate(100) == nullptr && !arena.contains(small, 1) &&
              arena.table_fd() == -1 && segments_left() == 0 && arena.free(large) &&
              arena.free(small) && !arena.free(small);
    _exit(ok ? 0 : 1);
  }
  char byte;
  ASSERT_EQ(read(done[0], &byte, 1), 1);
  EXPECT_TRUE(filled(small, 100, 1));
  fill(small, 100, 9);
  fill(large, 10 * kMiB, 9);
  EXPECT_TRUE(arena.free(large));
  std::byte* again = arena.allocate(10 * kMiB);
  fill(again, 10 * kMiB, 10);
  ASSERT_EQ(write(go[1], "x", 1), 1);
  int status = -1;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(filled(small, 100, 9));
}

TEST(ArenaFork, BlocksNeverTouchedStayWithoutPages) {
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

TEST(ArenaFork, BeyondTheBoundNothingIsThere) {
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

TEST(ArenaFork, WhileOtherThreadsAllocate) {
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

// Not through fork(): without its handlers a child must not have the segments.
TEST(ArenaFork, BareCloneHasNothing) {
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
