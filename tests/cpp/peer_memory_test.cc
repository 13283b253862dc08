// Access to a neighbour's arena from another process.
#include "intranode/peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <csignal>
#include <fstream>
#include <random>
#include <thread>

#include "arena_blocks.h"
#include "child.h"
#include "intranode/presence.h"
#include "results.h"

namespace smddp::intranode {
namespace {

// A neighbour: a child with an arena of its own. It sends words.
struct Owner : Child {
  using Child::Child;
  std::byte* receive_address() { return receive<std::byte*>(); }
  std::unique_ptr<PeerMemory> memory() { return value_of(PeerMemory::open(pid(), receive<int>())); }
};

uint64_t word(const void* address) { return reinterpret_cast<uint64_t>(address); }

TEST(PeerMemory, ReadsAndWritesTheOwnersBlocks) {
  Owner owner([](Child& self) {
    Arena arena({.first_segment = 2 * kMiB});
    self.send(arena.table_fd());
    for (size_t bytes : {size_t{1000}, 3 * kMiB, 100 * kMiB}) {
      std::byte* block = arena.allocate(bytes);
      fill(block, bytes, 0x5a);
      self.send(block);
      self.receive<int>();  // the test has read and written
      self.send(filled(block, 500, 0x11) && filled(block + 500, bytes - 500, 0x5a));
    }
    self.receive<int>();
  });
  auto peer = owner.memory();
  ASSERT_NE(peer, nullptr);
  for (size_t bytes : {size_t{1000}, 3 * kMiB, 100 * kMiB}) {
    std::byte* theirs = owner.receive_address();
    std::byte* here = peer->find(theirs, bytes);
    ASSERT_NE(here, nullptr);
    EXPECT_EQ(peer->find(theirs + 10, bytes - 10), here + 10);
    EXPECT_TRUE(filled(here, bytes, 0x5a));
    fill(here, 500, 0x11);
    owner.send(1);
    EXPECT_TRUE(owner.receive<bool>());
    EXPECT_EQ(peer->find(theirs, size_t{1} << 40), nullptr);
    EXPECT_EQ(peer->find(theirs, SIZE_MAX), nullptr);
  }
  EXPECT_EQ(peer->mapped(), 3u);
  EXPECT_EQ(peer->find(nullptr, 1), nullptr);
  EXPECT_EQ(peer->find(reinterpret_cast<std::byte*>(UINTPTR_MAX), SIZE_MAX), nullptr);
}

TEST(PeerMemory, UnmapsSegmentsThatTheOwnerReleased) {
  Owner owner([](Child& self) {
    Arena arena({.first_segment = 2 * kMiB, .keep = 0});
    self.send(arena.table_fd());
    // The kernel gives the next segment of the same size the same address and descriptor number.
    for (int i = 1; i <= 5; ++i) {
      std::byte* block = arena.allocate(2 * kMiB);
      fill(block, 2 * kMiB, i);
      self.send(block);
      self.receive<int>();
      arena.free(block);
      self.send(0);
      self.receive<int>();
    }
  });
  auto peer = owner.memory();
  ASSERT_NE(peer, nullptr);
  std::byte* before = nullptr;
  int same_address = 0;
  for (int i = 1; i <= 5; ++i) {
    std::byte* theirs = owner.receive_address();
    same_address += theirs == before;
    before = theirs;
    std::byte* here = peer->find(theirs, 2 * kMiB);
    ASSERT_NE(here, nullptr);
    EXPECT_TRUE(filled(here, 2 * kMiB, i));
    owner.send(1);
    owner.receive<int>();
    EXPECT_EQ(peer->find(theirs, 1), nullptr);
    EXPECT_EQ(peer->mapped(), 0u);
    owner.send(1);
  }
  EXPECT_GT(same_address, 0);
}

TEST(PeerMemory, StaysReadableAfterTheOwnerEndsAndLeavesNothing) {
  {
    std::unique_ptr<PeerMemory> peer;
    std::byte *theirs, *unseen;
    {
      Owner owner([](Child& self) {
        Arena arena({});
        self.send(arena.table_fd());
        std::byte* block = arena.allocate(kMiB);
        fill(block, kMiB, 3);
        self.send(block);
        self.send(arena.allocate(200 * kMiB));
        self.receive<int>();
      });
      peer = owner.memory();
      theirs = owner.receive_address();
      unseen = owner.receive_address();
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

TEST(PeerMemory, FailsIfTheTableCannotBeOpened) {
  EXPECT_FALSE(PeerMemory::open(getpid(), -1).ok());
  EXPECT_FALSE(PeerMemory::open(getpid(), 1 << 20).ok());
  EXPECT_FALSE(PeerMemory::open(1 << 30, 0).ok());
  FileDescriptor null(open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_FALSE(PeerMemory::open(getpid(), null.get()).ok());
  auto unsealed = value_of(create_shared("smddp-test", 1 << 20));
  EXPECT_FALSE(PeerMemory::open(getpid(), unsealed.fd.get()).ok());
}

// A table with any contents, as a broken or hostile neighbour could write it.
struct ForgedTable {
  ForgedTable() {
    fd = FileDescriptor(memfd_create("smddp-forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(fd.get(), 1 << 16), 0);
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    mapping = value_of(Mapping::map(1 << 16, MAP_SHARED, fd.get()));
    table()->magic = kArenaMagic;
  }
  ArenaTable* table() const { return reinterpret_cast<ArenaTable*>(mapping.data()); }
  FileDescriptor fd;
  Mapping mapping;
};

TEST(PeerMemory, InvalidTablesLeadToNullptr) {
  ForgedTable forged;
  auto peer = value_of(PeerMemory::open(getpid(), forged.fd.get()));
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
        ASSERT_EQ(peer->find(reinterpret_cast<std::byte*>(address), bytes), nullptr);
      }
    }
  }
  EXPECT_EQ(peer->mapped(), 0u);
}

TEST(PeerMemory, RefusesADescriptorNumberThatMeansAnotherFile) {
  Arena arena({.huge_pages = false});
  std::byte* block = arena.allocate(kMiB);
  ForgedTable forged;
  auto real = value_of(PeerMemory::open(getpid(), arena.table_fd()));
  fill(block, kMiB, 9);
  std::byte* alias = real->find(block, kMiB);
  ASSERT_NE(alias, nullptr);
  EXPECT_NE(alias, block);
  EXPECT_TRUE(filled(alias, kMiB, 9));

  FileDescriptor shrinkable(memfd_create("smddp-forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
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
  EXPECT_EQ(peer.value()->find(there, 4096), nullptr) << "change under way";
  entry.version += 1;
  EXPECT_NE(peer.value()->find(there, 4096), nullptr) << "the change is over";
}

// The owner changes an entry when a reader has read all of it but the last field: that one lies in the next
// page, whose first read calls `change_entry`.
std::byte* unread_page = nullptr;
std::function<void()> change_entry;

void on_first_read(int, siginfo_t*, void*) {
  change_entry();
  if (mprotect(unread_page, 4096, PROT_READ) != 0) _exit(1);
}

std::byte* read_only_mapping_of(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("r--s") == std::string::npos || line.find(name) == std::string::npos) continue;
    return reinterpret_cast<std::byte*>(std::stoull(line, nullptr, 16));
  }
  return nullptr;
}

TEST(PeerMemory, ReadsAnEntryAgainThatChangesMeanwhile) {
  constexpr uint32_t kEntry = 84;
  ForgedTable forged;
  ArenaEntry& entry = forged.table()->entries[kEntry];
  ASSERT_EQ(word(&entry.fd) % 4096, 0u);
  forged.table()->used = kEntry + 1;
  Shared segments[2];
  auto base = [](size_t i) { return reinterpret_cast<std::byte*>((1 + i) << 20); };
  auto announce = [&](size_t i) {
    struct stat info{};
    fstat(segments[i].fd.get(), &info);
    entry.version += 2;
    entry.base = word(base(i));
    entry.bytes = 4096;
    entry.device = info.st_dev;
    entry.inode = info.st_ino;
    entry.fd = static_cast<uint64_t>(segments[i].fd.get());
  };
  for (Shared& segment : segments) segment = value_of(create_shared("smddp-test", 4096));
  *segments[1].mapping.data() = std::byte{42};
  announce(0);
  auto peer = value_of(PeerMemory::open(getpid(), forged.fd.get()));
  std::byte* table = read_only_mapping_of("smddp-forged");
  ASSERT_NE(table, nullptr);
  unread_page = table + 4096;
  change_entry = [&] { announce(1); };
  struct sigaction handler{}, before{};
  handler.sa_sigaction = on_first_read;
  handler.sa_flags = SA_SIGINFO;
  ASSERT_EQ(sigaction(SIGSEGV, &handler, &before), 0);
  ASSERT_EQ(mprotect(unread_page, 4096, PROT_NONE), 0);
  std::byte* here = peer->find(base(1), 4096);
  ASSERT_EQ(sigaction(SIGSEGV, &before, nullptr), 0);
  EXPECT_EQ(entry.version, 4u) << "the change came in between";
  ASSERT_NE(here, nullptr);
  EXPECT_EQ(*here, std::byte{42});
  EXPECT_EQ(peer->find(base(0), 1), nullptr);
}

TEST(PeerMemory, FollowsAnArenaThatChanges) {
  Arena arena({.first_segment = 2 * kMiB, .largest_growth = 2 * kMiB, .keep = 0});
  auto peer = value_of(PeerMemory::open(getpid(), arena.table_fd()));
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
    std::byte* here = peer->find(theirs, kMiB);
    missing += here == nullptr;
    if (here != nullptr) wrong += *here != static_cast<std::byte>(i);
    published.store(nullptr, std::memory_order_release);
  }
  owner.join();
  EXPECT_EQ(missing, 0);
  EXPECT_EQ(wrong, 0);
}

TEST(Presence, AnnouncesTheArenaOfTheProcess) {
  auto presence = value_of(Presence::create());
  Presence& p = *presence;
  auto neighbor = value_of(Neighbor::open(getpid(), p.token(), p.presence_fd(), p.wake_fd()));
  std::byte* block = Arena::process().allocate(5000);
  block[4999] = std::byte{7};
  std::byte* found = neighbor->find(block, 5000);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found[4999], std::byte{7});
  EXPECT_EQ(neighbor->find(reinterpret_cast<std::byte*>(&block), 8), nullptr);
  EXPECT_TRUE(Arena::process().free(block));
}

}  // namespace
}  // namespace smddp::intranode
