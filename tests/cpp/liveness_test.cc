// Whether a process finds out what became of another one: it answers, has left a group, is stopped, has
// ended; and what strangers and forked children can't change about that.
#include "liveness/liveness.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "child.h"
#include "common/clock.h"
#include "group/join_watch.h"
#include "joining/heartbeat.h"
#include "liveness/prober.h"
#include "liveness/responder.h"
#include "liveness/sockets.h"
#include "world.h"

namespace smddp::liveness {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr JobKey kGroup = {1, 2, 3};

std::unique_ptr<Liveness> open() {
  auto opened = Liveness::open("127.0.0.1");
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  return std::move(opened.value());
}

// Asks until `done`, for at most `limit_ns`.
bool asks_until(Liveness& asker, Process process, const std::function<bool(const Verdict&)>& done,
                uint64_t limit_ns = 5 * kSecond, const JobKey& group = kGroup) {
  for (uint64_t until = now_ns() + limit_ns; now_ns() < until; usleep(10'000)) {
    if (done(asker.ask(process, group))) return true;
  }
  return false;
}

bool answers(const Verdict& verdict) { return verdict.answered_ns != 0; }
bool ended(const Verdict& verdict) { return verdict.ended; }

void publish(Child& child) {
  static Liveness* liveness = open().release();
  child.send(unpack(liveness->contact()).value());
}

TEST(Liveness, AProcessThatLivesAnswersAndOneThatClosedHasEnded) {
  auto asker = open(), other = open();
  Process process = asker->meet(other->contact()).value();
  EXPECT_EQ(asker->meet(other->contact()).value(), process);
  ASSERT_TRUE(asks_until(*asker, process, answers));
  Verdict verdict = asker->ask(process, kGroup);
  EXPECT_FALSE(verdict.ended);
  EXPECT_EQ(verdict.left_from, UINT64_MAX);
  other->close();
  EXPECT_TRUE(asks_until(*asker, process, ended, 3 * kSecond));
}

TEST(Liveness, AProcessThatEndedWhileNobodyAskedIsFoundAtOnce) {
  auto asker = open(), other = open();
  Process process = asker->meet(other->contact()).value();
  ASSERT_TRUE(asks_until(*asker, process, answers));
  usleep(4'000'000);  // the questions have stopped
  other->close();
  EXPECT_TRUE(asks_until(*asker, process, ended, kSecond / 2));
}

TEST(Liveness, AProcessThatWasNeverReachedIsNeverCalledDeadOrSilent) {
  auto asker = open(), other = open();
  std::vector<uint8_t> contact = other->contact();
  other.reset();
  Process process = asker->meet(contact).value();
  EXPECT_FALSE(asks_until(
      *asker, process, [](const Verdict& v) { return v.ended || v.silent_ns > 0; }, 3 * kSecond));
}

TEST(Liveness, AGroupThatWasLeftIsToldWithTheReason) {
  auto asker = open(), other = open();
  Process process = asker->meet(other->contact()).value();
  other->left(kGroup, 7, "rank 1 gave up");
  other->left(kGroup, 9, "later");
  ASSERT_TRUE(asks_until(*asker, process, [](const Verdict& v) { return v.left_from == 7; }));
  EXPECT_EQ(asker->ask(process, kGroup).reason, "rank 1 gave up");
  EXPECT_EQ(asker->ask(process, {9}).left_from, UINT64_MAX);
}

// A job of a year leaves 100,000 groups.
TEST(Liveness, TheReasonsOfManyGroupsThatWereLeftAreForgotten) {
  auto asker = open(), other = open();
  Process process = asker->meet(other->contact()).value();
  JobKey first{1}, group{};  // not the key that meet() asks about
  for (int i = 0; i <= 1024; ++i) {
    group = {1, static_cast<uint8_t>(i % 256), static_cast<uint8_t>(i / 256)};
    other->left(group, 7, "why");
  }
  for (const JobKey& of : {first, group}) {
    ASSERT_TRUE(asks_until(*asker, process, answers, 5 * kSecond, of));
    EXPECT_EQ(asker->ask(process, of).left_from, of == first ? UINT64_MAX : 7);
  }
}

TEST(Responder, AVisitorThatFallsSilentIsClosedAfterTwoSeconds) {
  auto responder = std::move(Responder::open("127.0.0.1").value());
  FileDescriptor visitor;
  ASSERT_EQ(begin_connect(responder->contact(), &visitor), 0);
  usleep(50'000);
  size_t said = 0;
  ASSERT_EQ(write_some(visitor, "?", 1, &said), Moved::kAll);
  for (auto [seconds, open] : {std::pair(1, 0u), {2, 1u}, {3, 1u}, {4, 0u}}) {
    std::vector<pollfd> fds;
    responder->watch(fds);
    EXPECT_EQ(fds.size(), 1 + open) << seconds;
    ::poll(fds.data(), fds.size(), 100);
    responder->serve(fds.data(), static_cast<uint64_t>(seconds) * kSecond);
  }
}

TEST(Liveness, AStoppedProcessIsSilentAndNotDead) {
  Child child(publish);
  auto asker = open();
  Process process = asker->meet(pack(child.receive<Contact>())).value();
  ASSERT_TRUE(asks_until(*asker, process, answers));
  child.signal(SIGSTOP);
  EXPECT_TRUE(asks_until(
      *asker, process, [](const Verdict& v) { return v.silent_ns > 3 * kSecond; }, 6 * kSecond));
  EXPECT_FALSE(asker->ask(process, kGroup).ended);
  uint64_t continued = now_ns();
  child.signal(SIGCONT);
  EXPECT_TRUE(asks_until(*asker, process, [&](const Verdict& v) {
    return v.answered_ns > continued && v.silent_ns == 0;
  }));
  child.end();
  EXPECT_TRUE(asks_until(*asker, process, ended, 3 * kSecond));
}

TEST(Liveness, AForkedChildDoesNotHideItsParentsDeath) {
  Child child([](Child& self) {
    publish(self);
    pid_t grandchild = fork();
    if (grandchild == 0) {
      for (;;) pause();
    }
    self.send(grandchild);
  });
  auto asker = open();
  Process process = asker->meet(pack(child.receive<Contact>())).value();
  auto grandchild = child.receive<pid_t>();
  ASSERT_TRUE(asks_until(*asker, process, answers));
  child.end();
  EXPECT_TRUE(asks_until(*asker, process, ended, 3 * kSecond));
  kill(grandchild, SIGKILL);
}

TEST(Liveness, AStrangerLearnsNothingAndTakesNoPlace) {
  auto asker = open(), other = open();
  Process process = asker->meet(other->contact()).value();
  Contact contact = unpack(other->contact()).value();
  std::vector<FileDescriptor> held(300);
  for (FileDescriptor& socket : held) ASSERT_EQ(begin_connect(contact, &socket), 0);
  usleep(50'000);
  for (const FileDescriptor& socket : held) {  // the kernel holds back those that say nothing
    size_t said = 0;
    ASSERT_EQ(write_some(socket, "?", 1, &said), Moved::kAll);
  }
  ASSERT_TRUE(asks_until(*asker, process, answers));
  int error = 0, closed = 0;
  char byte;
  for (const FileDescriptor& socket : held) {
    size_t none = 0;
    closed += read_some(socket, &byte, 1, &none, &error) == Moved::kFailed;
  }
  EXPECT_GT(closed, 150) << "those that were opened first";
  FileDescriptor stranger;
  ASSERT_EQ(begin_connect(contact, &stranger), 0);
  usleep(50'000);
  Question question;
  question.secret[0] = static_cast<uint8_t>(contact.ask[0] + 1);
  size_t sent = 0, got = 0;
  ASSERT_EQ(write_some(stranger, &question, sizeof question, &sent), Moved::kAll);
  usleep(200'000);
  EXPECT_EQ(read_some(stranger, &byte, 1, &got, &error), Moved::kFailed);
  EXPECT_EQ(got, 0u);
}

TEST(Liveness, OneThatHoldsThePortButNotTheSecretDoesNotAnswer) {
  auto asker = open(), other = open();
  Contact contact = unpack(other->contact()).value();
  contact.answer[5] ^= 1;
  Process process = asker->meet(pack(contact)).value();
  EXPECT_FALSE(asks_until(*asker, process, answers, kSecond));
}

TEST(Liveness, ADamagedContactIsRefused) {
  auto asker = open();
  EXPECT_FALSE(asker->meet({}).ok());
  EXPECT_FALSE(asker->meet(std::vector<uint8_t>(sizeof(Contact) + 1)).ok());
}

TEST(Liveness, ManyAreAskedAtOnce) {
  auto asker = open();
  std::vector<std::unique_ptr<Liveness>> others;
  std::vector<Process> processes;
  for (int i = 0; i < 200; ++i) {
    others.push_back(open());
    processes.push_back(asker->meet(others.back()->contact()).value());
  }
  for (Process process : processes) EXPECT_TRUE(asks_until(*asker, process, answers));
}

// One that asks, by a clock of the test's, and a port that answers if it is told to.
class ByTheClock : public testing::Test {
 protected:
  void SetUp() override {
    contact_.ask.fill(1);
    contact_.answer.fill(2);
    auto listener = listen_at("127.0.0.1", &contact_);
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    listener_ = std::move(listener.value());
    bool fresh = false;
    process_ = prober_.meet(contact_, &fresh);
    EXPECT_TRUE(fresh);
  }
  Verdict ask(bool anew = false) {
    bool fresh = false;
    return prober_.ask(process_, kGroup, now_, anew, &fresh);
  }
  // Whether a question goes out now.
  bool is_asked() {
    std::vector<pollfd> fds;
    prober_.watch(fds, now_);
    return !fds.empty();
  }
  // Time goes on by `ns`, in which the process is asked.
  void pass(uint64_t ns) {
    now_ += ns;
    ask();
    std::vector<pollfd> fds;
    prober_.watch(fds, now_);
    ::poll(fds.data(), fds.size(), 1);
    prober_.serve(fds.data(), now_);
  }
  void pass_seconds(double seconds) {
    for (int i = 0; i < static_cast<int>(5 * seconds + 0.5); ++i) pass(kSecond / 5);
  }
  // Until the question that is asked now, or next, is answered.
  void answer() { EXPECT_TRUE(answers_with("")); }
  bool answers_with(const std::string& reason) {
    uint64_t before = ask().answered_ns;
    for (int turn = 0; turn < 1000 && ask().answered_ns == before; ++turn) {
      int fd = ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd >= 0) asked_.emplace_back(fd);
      for (FileDescriptor& socket : asked_) {
        Answer answer;
        answer.secret = contact_.answer;
        answer.reason_bytes = static_cast<uint32_t>(reason.size());
        size_t sent = 0, explained = 0;
        write_some(socket, &answer, sizeof answer, &sent);
        write_some(socket, reason.data(), reason.size(), &explained);
      }
      pass(kSecond / 100);
    }
    asked_.clear();
    return ask().answered_ns != before;
  }

  Contact contact_;
  FileDescriptor listener_;
  std::vector<FileDescriptor> asked_;
  Prober prober_;
  Process process_ = 0;
  uint64_t now_ = 1000 * kSecond;
};

TEST_F(ByTheClock, SilenceCountsFromAQuestionToTheNextAnswer) {
  pass_seconds(2);
  EXPECT_EQ(ask().silent_ns, 0u) << "it was never reached";
  answer();
  for (int turn = 0; turn < 3; ++turn) {
    EXPECT_EQ(ask().silent_ns, 0u);
    pass_seconds(4);
    EXPECT_GT(ask().silent_ns, 2 * kSecond);
    EXPECT_LE(ask().silent_ns, 4 * kSecond);
    answer();
  }
  EXPECT_FALSE(ask().ended);
}

TEST_F(ByTheClock, AnAnswerWithALongReasonIsNone) {
  EXPECT_TRUE(answers_with(std::string(kReasonBytes, 'x')));
  EXPECT_EQ(ask().reason.size(), kReasonBytes);
  EXPECT_FALSE(answers_with(std::string(kReasonBytes + 1, 'x')));
}

TEST_F(ByTheClock, OneThatIsNoLongerWaitedForIsNotAsked) {
  answer();
  now_ += 4 * kSecond;
  EXPECT_FALSE(is_asked());
}

TEST_F(ByTheClock, OneThatHasAnsweredIsAskedAgainAfterASecondOrAnew) {
  answer();
  now_ += kSecond / 10;
  ask();
  EXPECT_FALSE(is_asked());
  ask(true);
  EXPECT_TRUE(is_asked());
}

TEST_F(ByTheClock, OnlySoManyAreAskedAtOnce) {
  std::vector<pollfd> fds;
  bool fresh = false;
  for (uint8_t i = 0; i < 200; ++i) {
    contact_.ask[1] = i;
    prober_.meet(contact_, &fresh);
  }
  prober_.watch(fds, now_);
  EXPECT_EQ(fds.size(), 128u);
}

TEST_F(ByTheClock, TimeInWhichThisProcessDidNotRunIsNoSilence) {
  answer();
  pass_seconds(4);
  uint64_t before = ask().silent_ns;
  pass(100 * kSecond);
  EXPECT_LE(ask().silent_ns, before + kSecond);
}

TEST_F(ByTheClock, WithoutADescriptorToAskWithNothingIsSilence) {
  answer();
  pass_seconds(4);  // the connection is given up after three seconds, and another one is due
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit none{0, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  pass_seconds(4);
  uint64_t silent = ask().silent_ns;
  pass_seconds(4);
  EXPECT_EQ(ask().silent_ns, silent);
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace smddp::liveness

namespace smddp {
namespace {

// --- ranks that make a group, and wait for one another

// Calls `seen` when a key is found in it, before the caller knows.
class ObservedStore : public MemoryStore {
 public:
  using MemoryStore::MemoryStore;
  bool has(const std::string& key) override {
    if (!MemoryStore::has(key)) return false;
    seen();
    return true;
  }
  std::function<void()> seen = [] {};
};

// A rank of another host that is waited for.
class Awaited {
 public:
  explicit Awaited(uint64_t silence_ns) : process_(Process::create()) {
    options_.name = "test";
    options_.silence_ns = silence_ns;
    info_.host = info_.host_name = "host-B";
  }
  // The first error of looks at it in so many seconds.
  Status look_for(double seconds) {
    JoinWatch watch(*process_.value(), store_, 2, options_);
    Status status;
    for (uint64_t until = now_ns() + static_cast<uint64_t>(seconds * 1e9);
         status && now_ns() < until; usleep(20'000))
      status = watch.look(1, info_, "host-A");
    return status;
  }
  ObservedStore store_{std::chrono::seconds(5)};

 private:
  Result<std::unique_ptr<Process>> process_;
  Group::Options options_;
  RankInfo info_;
};

// It has made its group between a look for its count and the reading of it.
TEST(JoinWatch, ARankThatEndsItsCountMeanwhileIsNotWaitedFor) {
  Awaited awaited(4'000'000'000);
  Heartbeat heart(awaited.store_, 1, kHeartbeat);
  ASSERT_TRUE(heart.begin().ok());
  awaited.store_.seen = [&] { heart.end(); };
  uint64_t begun = now_ns();
  EXPECT_TRUE(awaited.look_for(0.01).ok());
  EXPECT_LT(now_ns() - begun, 2'000'000'000u);
}

// One that counts; one whose count stands still, and whose process was not seen to end, as it has no port; the same
// without a limit on silence.
TEST(JoinWatch, OnlyARankWhoseCountStandsStillIsCalledSilent) {
  on_threads(3, [](int which) {
    const bool counts = which == 0, limited = which < 2;
    Awaited awaited(limited ? 4'000'000'000 : 0);
    Heartbeat heart(awaited.store_, 1, counts ? kHeartbeat : std::chrono::milliseconds(0));
    if (limited) ASSERT_TRUE(heart.begin().ok());
    uint64_t begun = now_ns();
    Status status = awaited.look_for(counts || !limited ? 7 : 9);
    if (counts || !limited) {
      EXPECT_TRUE(status.ok()) << status.message();
      return;
    }
    EXPECT_GE(now_ns() - begun, 4'000'000'000u);
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_TRUE(says(status, "rank 1 (host-B) is lost while group 'test' is made"));
    EXPECT_TRUE(says(status, "silence_seconds is 4 s"));
  });
}

}  // namespace
}  // namespace smddp
