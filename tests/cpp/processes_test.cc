// Ranks of one host that are processes of their own: what the others learn when one of them ends, or is
// stopped.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "child.h"
#include "group/failure_detector.h"
#include "rank_processes.h"

namespace smddp {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;

// An AllGather to which rank 0 gives so much that the others read it out of its memory, and they a byte each.
struct Gather {
  explicit Gather(const RankContext& c) : in(c.rank == 0 ? kLarge : 1, 'a') {
    Sizes sizes = equal_sizes(c.ranks, 1);
    sizes[0] = kLarge;
    out.resize(kLarge + sizes.size() - 1);
    op = operation_of(Collective::kAllGather, 0, in, {in.size()}, out, sizes);
  }
  bool read_directly() const { return op->path == "single-copy"; }

  static constexpr size_t kLarge = 1 << 20;
  std::vector<char> in, out;
  std::shared_ptr<Operation> op;
};

TEST(Processes, ARankThatEndsBeforeItHasReadIsMissed) {
  Processes ranks("AA", [](RankContext& c) -> std::string {
    Gather gather(c);
    if (c.rank == 1) {
      c.group.submit(gather.op, {}, false);  // pushes, and drives no further
      say(c.store, "pushed");
      await(c.store, "submitted");
      _exit(0);
    }
    if (!await(c.store, "pushed")) return "rank 1 has not pushed";
    c.group.submit(gather.op, {}, false);
    say(c.store, "submitted");
    if (!gather.read_directly()) return "";  // then rank 0 waits for no reader
    if (!c.engine.wait(*gather.op, std::chrono::seconds(10))) return "rank 1 is not missed";
    const Status& status = gather.op->status();
    bool told = status.code() == Code::kPeerLost &&
                status.message().find("rank 1 (A) (process ") == 0 &&
                status.message().find("ended during") != std::string::npos;
    return told ? "" : "not told: " + status.message();
  });
  ranks.expect_end(0);
  ranks.expect_end(1);
}

// Rank 2 is late, so rank 0 waits for it. Rank 1 has all that it needs, and no rank needs it any more.
TEST(Processes, ARankThatHasDoneItsPartMayEnd) {
  Processes ranks("AAA", [](RankContext& c) -> std::string {
    Gather gather(c);
    if (c.rank == 2) {
      c.group.submit(gather.op, {}, false);  // pushes, and drives no further
      say(c.store, "pushed");
      await(c.store, "rank 1 has ended");
    } else {
      if (!await(c.store, "pushed")) return "rank 2 has not pushed";
      c.group.submit(gather.op, {}, false);
    }
    c.engine.wait(*gather.op);
    if (!gather.op->status()) return gather.op->status().message();
    if (c.rank == 1) _exit(0);
    return "";
  });
  ranks.expect_end(1);
  usleep(100'000);  // rank 0 looks
  say(ranks.store(), "rank 1 has ended");
  ranks.expect_end(0);
  ranks.expect_end(2);
}

// --- ranks that are stopped, by a clock of the test's

// Rank 0 of two, with a fragment in flight. Rank 1 is a process that has joined, and does nothing.
class Stopped : public testing::Test {
 protected:
  struct Joined {
    uint64_t token;
    int presence, wake, outbox;
  };

  void SetUp() override {
    auto theirs = child_.receive<Joined>();
    auto own = std::move(intranode::Outbox::create({}, 1).value());
    own->expect(1);
    local_ = LocalPeers(std::move(own));
    std::shared_ptr<intranode::Neighbor> neighbor = std::move(
        intranode::Neighbor::open(child_.pid(), theirs.token, theirs.presence, theirs.wake)
            .value());
    local_.add(
        1, std::move(intranode::Inbox::open(child_.pid(), theirs.outbox, {}, 0, 1, false).value()),
        std::move(neighbor));
    auto op = std::make_shared<Operation>();
    for (Blocks* blocks : {&op->input, &op->output}) {
      blocks->end_block();
      blocks->end_block();
    }
    fragments_.add(make_allgather(context_, op, 0, 0, 1));
    fragments_.advance()->start();
  }
  // Sends a signal, and waits until it has stopped, or continued, the process.
  void signal(int number) {
    child_.signal(number);
    siginfo_t info;
    waitid(P_PID, static_cast<id_t>(child_.pid()), &info,
           number == SIGSTOP ? WSTOPPED : WCONTINUED);
  }
  Status look() {
    now_ += kSecond;
    failures_.watch(now_);
    return health_.verdict();
  }

  Child child_{[](Child& self) {
    auto presence = value_of(intranode::Presence::create());
    auto outbox = value_of(intranode::Outbox::create({}, 1));
    self.send(
        Joined{presence->token(), presence->presence_fd(), presence->wake_fd(), outbox->fd()});
    for (;;) ::pause();
  }};
  Members members_{0, Topology({"A", "A"}), "g", {"A", "A"}, {0, 1}};
  Shape shape_{.ranks = 2};
  LocalPeers local_;
  RemotePeers remote_{{}, {}, 0, 2, nullptr, 0};
  RailTurns turns_;
  PeerTallies tallies_{2};
  CodingChoice coding_;
  Health health_;
  StagingPool staging_;
  FragmentQueue fragments_;
  FragmentContext context_{members_, shape_,  local_,  remote_, turns_,
                           tallies_, coding_, health_, staging_};
  RemoteWatch remote_watch_{{}, members_, remote_, fragments_, {}, 0};
  FailureDetector failures_{members_, local_,        remote_,        fragments_,
                            health_,  remote_watch_, 3600 * kSecond, 5 * kSecond};
  uint64_t now_ = 1000 * kSecond;
};

TEST_F(Stopped, ForLongIsLost) {
  signal(SIGSTOP);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(look().ok()) << i;
  Status lost = look();
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_TRUE(says(lost, "rank 1 (A) is lost during"));
}

TEST_F(Stopped, ForSeveralShortTimesIsNotLost) {
  for (int turn = 0; turn < 5; ++turn) {
    signal(SIGSTOP);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(look().ok()) << turn;
    signal(SIGCONT);
    EXPECT_TRUE(look().ok()) << turn;
  }
}

TEST_F(Stopped, WhileThisProcessDidNotRunIsNotLost) {
  signal(SIGSTOP);
  EXPECT_TRUE(look().ok());
  now_ += 100 * kSecond;
  EXPECT_TRUE(look().ok());
}

}  // namespace
}  // namespace smddp
