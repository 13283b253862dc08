// The segments that the ranks of a host share: no process can shrink them, what a reader has checked does not
// change under it, and what it reads from a rank that gives up meanwhile is not handed out. And what a process
// allows others: to read its memory, to guess its keys.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <set>

#include "child.h"
#include "common/clock.h"
#include "common/random.h"
#include "debug_setting.h"
#include "flows/local_peers.h"
#include "intranode/presence.h"
#include "two_cores.h"
#include "world.h"

namespace {

std::atomic<int> ptracers_allowed{0};
std::atomic<bool> no_getrandom{false};
// Before process_vm_readv(), on the threads that say that they are readers.
std::function<void()> before_read;
thread_local bool is_reader = false;
// Before process_vm_readv() reads at an address, on any thread.
std::function<void(const void*)> before_read_at;
// Bytes that one process_vm_readv() of this thread copies at most; 0: no bound.
thread_local size_t most_per_read = 0;

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// These stand before the C library's.

extern "C" int prctl(int option, ...) {
  va_list list;
  va_start(list, option);
  unsigned long first = va_arg(list, unsigned long), second = va_arg(list, unsigned long);
  unsigned long third = va_arg(list, unsigned long), fourth = va_arg(list, unsigned long);
  va_end(list);
  if (option == PR_SET_PTRACER) ++ptracers_allowed;
  using Prctl = int (*)(int, ...);
  static auto real = next<Prctl>("prctl");
  return real(option, first, second, third, fourth);
}

extern "C" ssize_t getrandom(void* to, size_t bytes, unsigned flags) {
  if (no_getrandom) {
    errno = ENOSYS;
    return -1;
  }
  static auto real = next<ssize_t (*)(void*, size_t, unsigned)>("getrandom");
  return real(to, bytes, flags);
}

extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long locals,
                                    const iovec* remote, unsigned long remotes,
                                    unsigned long flags) {
  if (is_reader && before_read) before_read();
  if (before_read_at) before_read_at(remote[0].iov_base);
  using Read =
      ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);
  static auto real = next<Read>("process_vm_readv");
  if (most_per_read == 0) return real(pid, local, locals, remote, remotes, flags);
  iovec first{local[0].iov_base, std::min(local[0].iov_len, most_per_read)};
  return real(pid, &first, 1, remote, remotes, flags);
}

namespace smddp {
namespace {

using intranode::Inbox;
using intranode::Lane;
using intranode::Outbox;
using intranode::Piece;

FileDescriptor reopened(int fd) {
  return FileDescriptor(::open(intranode::fd_path(getpid(), fd).c_str(), O_RDWR | O_CLOEXEC));
}

TEST(Segments, NoProcessCanShrinkThem) {
  auto outbox = Outbox::create({}, 1);
  ASSERT_TRUE(outbox.ok());
  auto presence = value_of(intranode::Presence::create());
  for (int fd : {outbox.value()->fd(), presence->presence_fd()}) {
    FileDescriptor other = reopened(fd);
    ASSERT_TRUE(other);
    EXPECT_NE(ftruncate(other.get(), 0), 0);
    EXPECT_EQ(errno, EPERM);
  }
}

TEST(Segments, OneThatCouldShrinkIsRefused) {
  FileDescriptor fd(memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), 1 << 20), 0);
  auto inbox = Inbox::open(getpid(), fd.get(), {}, 0, 1, false);
  ASSERT_FALSE(inbox.ok());
  EXPECT_TRUE(says(inbox.status(), "not a shared segment"));
}

// The head of an outbox and its pieces, as another process sees them.
struct Raw {
  explicit Raw(const Outbox& outbox) : fd(reopened(outbox.fd())) {
    struct stat info{};
    fstat(fd.get(), &info);
    bytes = static_cast<size_t>(info.st_size);
    at = static_cast<std::byte*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
  }
  ~Raw() { munmap(at, bytes); }
  intranode::OutboxHead& head() { return *reinterpret_cast<intranode::OutboxHead*>(at); }
  FileDescriptor fd;
  size_t bytes = 0;
  std::byte* at = nullptr;
};

// Also before its parent has waited for it.
TEST(Segments, OneOfAProcessThatHasEndedIsTold) {
  Child child([](Child& self) {
    auto made = intranode::create_shared("test", 4096);
    self.send(made ? made.value().fd.get() : -1);
    (void)self.receive<int>();
    ::_exit(0);
  });
  const int fd = child.receive<int>(), pid = child.pid();
  EXPECT_TRUE(intranode::map_shared(pid, fd, "a rank"));
  Status wrong = intranode::map_shared(pid, fd + 100, "a rank").status();
  EXPECT_NE(wrong.code(), Code::kPeerLost);
  EXPECT_TRUE(says(wrong, "could not open the shared segment of a rank"));
  child.send(0);
  siginfo_t ended{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT), 0);
  for (bool reaped : {false, true}) {
    if (reaped) child.end();
    Status s = intranode::map_shared(pid, fd, "a rank").status();
    EXPECT_EQ(s.code(), Code::kPeerLost) << s.message();
    EXPECT_TRUE(says(s, "has ended"));
  }
}

TEST(Segments, WhatWasCheckedDoesNotChange) {
  auto outbox = Outbox::create({}, 1);
  ASSERT_TRUE(outbox.ok());
  outbox.value()->expect(1);
  Raw raw(*outbox.value());
  auto inbox = Inbox::open(getpid(), outbox.value()->fd(), {}, 0, 1, false);
  ASSERT_TRUE(inbox.ok());
  raw.head().capacity = 1 << 30;  // a reader that used it would read far beyond the segment
  std::byte* slot = outbox.value()->next(Lane::kSums);
  std::memset(slot, 7, 100);
  Piece piece;
  piece.bytes = 100;
  piece.shard = 5;
  outbox.value()->publish(Lane::kSums, piece);
  const Piece* head = inbox.value()->head(Lane::kSums);
  ASSERT_NE(head, nullptr);
  EXPECT_EQ(head->bytes, 100u);
  EXPECT_EQ(inbox.value()->bytes(Lane::kSums)[99], std::byte{7});
  // The owner rewrites the piece.
  for (size_t i = 0; i + sizeof piece <= raw.bytes; i += 8) {
    if (std::memcmp(raw.at + i, &piece, sizeof piece) != 0) continue;
    piece.bytes = 1 << 30;
    std::memcpy(raw.at + i, &piece, sizeof piece);
    break;
  }
  EXPECT_EQ(inbox.value()->head(Lane::kSums), head);
  EXPECT_EQ(head->bytes, 100u);
}

TEST(Segments, AReasonThatDoesNotEndIsCutOff) {
  auto outbox = Outbox::create({}, 1);
  ASSERT_TRUE(outbox.ok());
  Raw raw(*outbox.value());
  auto inbox = Inbox::open(getpid(), outbox.value()->fd(), {}, 0, 1, false);
  ASSERT_TRUE(inbox.ok());
  EXPECT_EQ(inbox.value()->aborted(), nullptr);
  size_t behind = offsetof(intranode::OutboxHead, reason);
  std::memset(raw.at + behind, 'x', raw.bytes - behind);
  raw.head().aborted = intranode::GaveUp::kBroken;
  EXPECT_EQ(inbox.value()->aborted(), std::string(kReasonBytes - 1, 'x'));
}

TEST(Segments, ASlotIsReusedWhenAllReadersAreDoneWithIt) {
  auto outbox = value_of(Outbox::create({}, 3));
  outbox->expect(2);
  std::vector<std::unique_ptr<Inbox>> inboxes;
  for (int reader = 0; reader < 2; ++reader) {
    inboxes.push_back(value_of(Inbox::open(getpid(), outbox->fd(), {}, reader, 2, false)));
  }
  std::byte* first = outbox->next(Lane::kSums);
  for (size_t i = 0; i < intranode::kSlots; ++i) {
    ASSERT_NE(outbox->next(Lane::kSums), nullptr) << i;
    outbox->publish(Lane::kSums, {});
  }
  EXPECT_EQ(outbox->next(Lane::kSums), nullptr);
  for (int reader : {0, 1}) {
    EXPECT_EQ(outbox->next(Lane::kSums), nullptr) << reader;
    auto& inbox = inboxes[static_cast<size_t>(reader)];
    ASSERT_NE(inbox->head(Lane::kSums), nullptr);
    inbox->pop(Lane::kSums);
  }
  EXPECT_EQ(outbox->read_by_all(Lane::kSums), 1u);
  EXPECT_EQ(outbox->next(Lane::kSums), first);
}

TEST(Segments, APieceWaitsForNoneOfTheOtherLane) {
  auto outbox = value_of(Outbox::create({}, 3));
  outbox->expect(1);
  auto inbox = value_of(Inbox::open(getpid(), outbox->fd(), {}, 0, 1, false));
  Piece piece;
  for (piece.seq = 0; piece.seq < intranode::kSlots; ++piece.seq) {
    *outbox->next(Lane::kGathers) = std::byte{1};
    outbox->publish(Lane::kGathers, piece);
  }
  ASSERT_EQ(outbox->next(Lane::kGathers), nullptr);
  ASSERT_NE(outbox->next(Lane::kSums), nullptr);
  *outbox->next(Lane::kSums) = std::byte{2};
  outbox->publish(Lane::kSums, piece);
  ASSERT_NE(inbox->head(Lane::kSums), nullptr);
  EXPECT_EQ(inbox->head(Lane::kSums)->seq, intranode::kSlots);
  EXPECT_EQ(*inbox->bytes(Lane::kSums), std::byte{2});
  inbox->pop(Lane::kSums);
  EXPECT_EQ(inbox->head(Lane::kSums), nullptr);
  EXPECT_EQ(inbox->head(Lane::kGathers)->seq, 0u);
  EXPECT_EQ(*inbox->bytes(Lane::kGathers), std::byte{1});
  EXPECT_EQ(outbox->read_by_all(Lane::kSums), 1u);
  EXPECT_EQ(outbox->read_by_all(Lane::kGathers), 0u);
}

TEST(Segments, AReaderThatMayNotReadTheOwnersMemorySaysSo) {
  for (bool allow : {true, false}) {
    auto outbox = value_of(Outbox::create({}, 1));
    outbox->expect(1);
    auto inbox = value_of(Inbox::open(getpid(), outbox->fd(), {}, 0, 1, allow));
    EXPECT_TRUE(outbox->all_attached());
    EXPECT_EQ(outbox->any_denied(), !allow);
    EXPECT_EQ(inbox->any_denied(), !allow);
  }
}

// Two groups of one process, and operations whose memory is read with process_vm_readv(). If rank 1 gives
// nothing, it has nothing to wait for once it has read.
void give_up_while_it_is_read(bool both_give) {
  constexpr size_t kCount = 1 << 18;
  std::atomic<int> reads{0};
  std::atomic<bool> submitted{false}, over{false};
  std::vector<std::shared_ptr<Operation>> ops(2);
  std::vector<RankContext*> contexts(2);
  std::vector<std::vector<int>> in(2), out(2);
  std::barrier both(2);
  run_world("AA", [&](RankContext& c) {
    auto me = static_cast<size_t>(c.rank);
    contexts[me] = &c;
    in[me].assign(kCount, c.rank + 1);
    out[me].assign(2 * kCount, -1);
    ops[me] = both_give ? gather_of(in[me], out[me], 2)
                        : operation_of(Collective::kAllGather, 0, in[me],
                                       {c.rank == 0 ? kCount : 0}, out[me], {kCount, 0});
    // When rank 1 reads, rank 0 gives up, and its caller reuses its memory.
    if (c.rank == 0) {
      before_read = [&] {
        if (++reads != 1) return;
        contexts[0]->group.abort("asked to");
        while (!ops[0]->complete())
          contexts[0]->engine.wait(*ops[0], std::chrono::milliseconds(10));
        std::fill(in[0].begin(), in[0].end(), 99);
      };
    }
    both.arrive_and_wait();
    if (c.rank == 0) {
      c.group.submit(ops[0], {}, false);
      submitted = true;
      while (!over) sched_yield();  // rank 0 does not read
      c.engine.wait(*ops[0]);
      EXPECT_FALSE(ops[0]->status().ok());
    } else {
      is_reader = true;
      while (!submitted) sched_yield();
      c.group.submit(ops[1], {}, false);
      c.engine.wait(*ops[1]);
      if (ops[1]->status()) {
        auto right = std::count(out[1].begin(), out[1].begin() + kCount, 1);
        EXPECT_EQ(static_cast<size_t>(right), kCount);
      } else {
        EXPECT_TRUE(says(ops[1]->status(), "asked to"));
      }
      over = true;
    }
    both.arrive_and_wait();
  });
  before_read = nullptr;
  EXPECT_GT(reads, 0);
}

// Rank 1 has pushed all that rank 0 needs, and reads nothing of what rank 0 gives until that one has looked:
// its caller may not have its memory back.
TEST(DirectReads, EndTheOperationWhenTheyAreOver) {
  constexpr size_t kCount = 1 << 18;
  for (bool gathers : {true, false}) {
    std::atomic<bool> looked{false};
    std::vector<int> given(gathers ? kCount : 2 * kCount, 1);
    before_read_at = [&](const void* at) {
      bool held = at >= given.data() && at < given.data() + given.size();
      while (held && !looked) usleep(100);
    };
    run_world("AA", [&](RankContext& c) {
      std::vector<int> other(given.size(), 2), out(gathers ? 2 * kCount : kCount);
      std::vector<int>& in = c.rank == 0 ? given : other;
      auto op =
          gathers ? gather_of(in, out, 2) : scatter_of(in, out, 2, Dtype::kInt32, ReduceOp::kSum);
      c.group.submit(op, {}, true);
      if (c.rank == 0) {
        EXPECT_FALSE(c.engine.wait(*op, std::chrono::milliseconds(300)));
        looked = true;
      }
      c.engine.wait(*op);
      ASSERT_TRUE(op->status().ok()) << op->status().message();
      EXPECT_EQ(op->path, "single-copy");
      EXPECT_EQ(out[0], gathers ? 1 : 3);
      EXPECT_EQ(out.back(), gathers ? 2 : 3);
    });
    before_read_at = nullptr;
  }
}

TEST(DirectReads, FromARankThatGivesUpMeanwhileAreNotHandedOut) {
  give_up_while_it_is_read(true);
  give_up_while_it_is_read(false);
}

// The kernel may copy less than it was asked for.
TEST(DirectReads, GoOnAfterAShortOne) {
  std::vector<std::byte> from(10'000), to(10'000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 251);
  using intranode::Extent;
  Extent sources[] = {{from.data(), 100}, {from.data() + 100, 7000}, {from.data() + 7100, 2900}};
  Extent targets[] = {{to.data(), 3000}, {to.data() + 3000, 6500}};
  most_per_read = 999;
  Status read = intranode::single_copy_read(getpid(), sources, 3, 500, 9500, targets, 2);
  most_per_read = 0;
  ASSERT_TRUE(read.ok()) << read.message();
  EXPECT_EQ(std::memcmp(to.data(), from.data() + 500, 9500), 0);
  EXPECT_EQ(to[9500], std::byte{0});
}

// A presence, and the view that the neighbours have of it.
struct Bell {
  std::unique_ptr<intranode::Presence> presence = value_of(intranode::Presence::create());
  std::shared_ptr<intranode::Neighbor> neighbor = value_of(intranode::Neighbor::open(
      getpid(), presence->token(), presence->presence_fd(), presence->wake_fd()));
  bool rung() const {
    pollfd bell{presence->wait_fd(), POLLIN, 0};
    return poll(&bell, 1, 0) == 1;
  }
};

TEST(Doorbell, IsRungAfterAPushAndAfterAPopIfTheNeighbourSleeps) {
  auto theirs = value_of(Outbox::create({}, 1));
  theirs->expect(1);
  auto own = value_of(Outbox::create({}, 1));
  own->expect(1);
  Bell bell;
  LocalPeers peers(std::move(own));
  peers.add(1, value_of(Inbox::open(getpid(), theirs->fd(), {}, 0, 1, false)), bell.neighbor);
  theirs->publish(Lane::kSums, {});
  for (const char* what : {"nothing", "pop", "push", "nothing"}) {
    bell.presence->announce_sleep();
    if (what == std::string("pop")) peers.pop(Lane::kSums, 0);
    if (what == std::string("push")) peers.push(Lane::kSums, {});
    peers.wake();
    EXPECT_EQ(bell.rung(), what != std::string("nothing")) << what;
    bell.presence->announce_awake();
    bell.presence->drain();
  }
}

// A rank that publishes looks whether the other one sleeps; the other one says that it sleeps, and looks for
// what was published. One of the two sees the other. Each has in its cache what it looks at.
TEST(Doorbell, IsRungIfTheSleeperHasNotSeenWhatWasPublished) {
  Bell bell;
  alignas(64) std::atomic<uint64_t> word{0};
  alignas(64) std::atomic<uint64_t> round{0};
  alignas(64) std::atomic<uint64_t> go{0};
  alignas(64) std::atomic<uint64_t> over{0};
  std::atomic<bool> stop{false};
  auto await = [&](std::atomic<uint64_t>& what, uint64_t value) {
    for (int looks = 0; what.load() != value && !stop; ++looks) {
      if (looks > 1000) sched_yield();
    }
  };
  auto spend = [](uint64_t turns) {
    for (; turns > 0; --turns) std::atomic_signal_fence(std::memory_order_seq_cst);
  };
  TwoCores cores;
  if (!cores.take(0)) GTEST_SKIP() << "this process may not choose its core";
  std::thread publisher([&] {
    cores.take(1);
    for (uint64_t i = 1; !stop; ++i) {
      await(round, i);
      bell.neighbor->wake();  // which does not sleep
      go.store(i);
      spend(i % 61 * 16);
      word.store(i, std::memory_order_release);
      bell.neighbor->wake();
      over.store(i);
    }
  });
  int missed = 0;
  uint64_t until = now_ns() + 500'000'000;
  for (uint64_t i = 1; now_ns() < until; ++i) {
    round.store(i);
    await(go, i);
    (void)word.load();
    spend(i % 17 * 16);
    bell.presence->announce_sleep();
    bool seen = word.load(std::memory_order_acquire) == i;
    await(over, i);
    if (!seen && !bell.rung()) ++missed;
    bell.presence->announce_awake();
    bell.presence->drain();
  }
  stop = true;
  publisher.join();
  EXPECT_EQ(missed, 0);
}

TEST(Presence, IsThatOfTheProcessWithTheToken) {
  auto presence = value_of(intranode::Presence::create());
  auto open = [&](uint64_t token) {
    return intranode::Neighbor::open(getpid(), token, presence->presence_fd(), presence->wake_fd());
  };
  EXPECT_TRUE(open(presence->token()).ok());
  auto another = open(presence->token() + 1);
  ASSERT_FALSE(another.ok());
  EXPECT_TRUE(says(another.status(), "is not the rank"));
}

TEST(Permissions, OnlyRanksThatReadMemoryAllowIt) {
  for (const char* wanted : {"0", "1", "auto"}) {
    DebugSetting set("single_copy", wanted);
    ptracers_allowed = 0;
    ASSERT_TRUE(intranode::Presence::create().ok());
    EXPECT_EQ(ptracers_allowed, std::string(wanted) == "0" ? 0 : 1) << wanted;
  }
}

TEST(Random, NumbersOfAForkedChildAreItsOwn) {
  uint64_t before = 0, here = 0;
  ASSERT_TRUE(draw_number(&before));
  Child child([](Child& self) {
    uint64_t there = 0;
    if (draw_number(&there)) self.send(there);
  });
  ASSERT_TRUE(draw_number(&here));
  EXPECT_NE(here, child.receive<uint64_t>());
}

TEST(Random, IsNeverAConstantWithoutGetrandom) {
  no_getrandom = true;
  std::set<uint64_t> drawn;
  for (int i = 0; i < 100; ++i) {
    uint64_t number = 0;
    ASSERT_TRUE(fill_random(&number, sizeof number));
    drawn.insert(number);
  }
  EXPECT_EQ(drawn.size(), 100u);
  // Without /dev/urandom there is none, and no endpoint.
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit none{0, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  uint64_t number = 0;
  bool filled = fill_random(&number, sizeof number);
  setrlimit(RLIMIT_NOFILE, &before);
  no_getrandom = false;
  EXPECT_FALSE(filled);
}

}  // namespace
}  // namespace smddp
