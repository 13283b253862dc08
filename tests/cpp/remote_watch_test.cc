// What a rank concludes about another one on another host that it waits for, by a clock of the test's.
#include "group/remote_watch.h"

#include <unistd.h>

#include "world.h"

namespace smddp {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr JobKey kGroup{1};

// Rank 0 of two, which waits for two bytes of rank 1. That one is a port that answers questions, and a transport.
class Watched : public testing::Test {
 protected:
  void SetUp() override {
    ShuffledNetwork::only().orderly = true;
    for (auto* transport : {&own_, &other_})
      *transport = std::move(ShuffledTransport::open().value());
    asks_ = std::move(liveness::Liveness::open("127.0.0.1").value());
    answers_ = std::move(liveness::Liveness::open("127.0.0.1").value());
    remote_.emplace(kGroup, siphash::Key{}, 0, 2, own_.get(), size_t{1} << 20);
    remote_->add(1, own_->add_peer(other_->facts().address).value());
    context_.emplace(FragmentContext{members_, shape_, local_, *remote_, turns_, tallies_, coding_,
                                     health_, staging_});
    for (int rank = 0; rank < 2; ++rank) {
      op_->output.add(bytes_[rank], kBytes);
      op_->output.end_block();
    }
    op_->input.add(bytes_[0], kBytes);
    op_->input.end_block();
    fragments_.add(make_allgather(*context_, op_, 0, 0, kBytes));
    fragments_.advance()->start();
  }
  void TearDown() override { ShuffledNetwork::only().orderly = false; }
  void watch(uint64_t silence_ns) {
    LivenessOfRanks liveness;
    liveness.service = asks_.get();
    liveness.processes = {asks_->meet(answers_->contact()).value()};
    process_ = *liveness.processes[0];
    await([&] { return asks_->ask(process_, kGroup).answered_ns != 0; });
    watch_.emplace(kGroup, members_, *remote_, fragments_, std::move(liveness), silence_ns);
    begin_ = ++now_;
    EXPECT_TRUE(watch_->look(now_).ok());
  }
  template <class Done>
  static void await(Done&& done) {
    for (int turn = 0; turn < 500 && !done(); ++turn) usleep(10'000);
    EXPECT_TRUE(done());
  }
  // So many bytes of rank 1 come.
  void arrive(uint32_t bytes) {
    wire::Header header{};
    header.type = wire::Type::kData;
    header.source = 1;
    header.bytes = header.raw_bytes = bytes;
    header.signature = op_->signature();
    const std::byte data[kBytes] = {};
    EXPECT_TRUE(fragments_.find(0)->on_message(header, data).ok());
  }
  Connection::State state() { return watch_->connection(1, now_).state; }
  // Looks until so long after the first look, while nothing comes of rank 1. The first bad status.
  Status look_until(double seconds) {
    Status status;
    while (status && now_ < begin_ + static_cast<uint64_t>(seconds * 1e9)) {
      now_ += kSecond / 10;
      status = watch_->look(now_);
    }
    return status;
  }

  Members members_{0, Topology({"A", "B"}), "g", {"A", "B"}, {0, 1}};
  Shape shape_{.ranks = 2, .nodes = 2};
  std::unique_ptr<transport::Transport> own_, other_;
  std::unique_ptr<liveness::Liveness> asks_, answers_;
  LocalPeers local_;
  std::optional<RemotePeers> remote_;
  RailTurns turns_;
  PeerTallies tallies_{2};
  CodingChoice coding_;
  Health health_;
  StagingPool staging_;
  std::optional<FragmentContext> context_;
  static constexpr size_t kBytes = 2;
  char bytes_[2][kBytes] = {};
  std::shared_ptr<Operation> op_ = std::make_shared<Operation>();
  FragmentQueue fragments_;
  std::optional<RemoteWatch> watch_;
  liveness::Process process_ = 0;
  uint64_t now_ = 1000 * kSecond, begin_ = 0;
};

TEST_F(Watched, OneThatAnswersIsWaitedForWithoutALimitOnSilence) {
  watch(0);
  Status status = look_until(100);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(state(), Connection::State::kUnanswered);
  EXPECT_FALSE(watch_->connection(1, now_).last_message_ns);
}

TEST_F(Watched, OneWhoseMessagesComeIsConnected) {
  watch(0);
  wire::Header header{};
  header.source = 1;
  EXPECT_FALSE(remote_->accept(header, nullptr)) << "it is not authentic";
  EXPECT_EQ(state(), Connection::State::kUnanswered);
  header.mac = wire::mac_of({}, header, nullptr);
  EXPECT_TRUE(remote_->accept(header, nullptr));
  Connection connection = watch_->connection(1, recent_ns() + 3 * kSecond);
  EXPECT_EQ(connection.state, Connection::State::kConnected);
  ASSERT_TRUE(connection.last_message_ns);
  EXPECT_GE(*connection.last_message_ns, 3 * kSecond);
  EXPECT_EQ(connection.path, own_->facts().rails);
}

TEST_F(Watched, OneThatHasEndedIsLostOnceNothingMoreCanCome) {
  watch(0);
  answers_->close();
  await([&] { return asks_->ask(process_, kGroup).ended; });
  EXPECT_TRUE(look_until(1.9).ok()) << "its last data may be on the way";
  Status lost = look_until(2.5);
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_TRUE(says(lost, "rank 1 (B) is lost during"));
  EXPECT_EQ(state(), Connection::State::kEnded);
}

TEST_F(Watched, OneThatHasLeftFromALaterFragmentOnIsLostOnceNothingMoreCanCome) {
  answers_->left(kGroup, 7, "why");
  watch(0);
  EXPECT_TRUE(look_until(1.9).ok()) << "its last data may be on the way";
  Status left = look_until(2.5);
  EXPECT_EQ(left.code(), Code::kAborted);
  EXPECT_EQ(left.message(), "why");
  EXPECT_EQ(state(), Connection::State::kLeft);
  EXPECT_EQ(watch_->connection(1, now_).why, "why");
}

TEST_F(Watched, OneThatHasLeftFromThisFragmentOnIsLost) {
  answers_->left(kGroup, 0, "why");
  watch(0);
  EXPECT_EQ(look_until(1.5).message(), "why");
}

TEST_F(Watched, OneThatHasLeftIsAskedAtOnceIfAnotherRankHasGivenUp) {
  watch(0);
  answers_->left(kGroup, 0, "why");
  EXPECT_TRUE(look_until(0.5).ok());
  uint64_t before = asks_->ask(process_, kGroup).answered_ns;
  EXPECT_TRUE(watch_->look(now_ += kSecond / 10, true).ok()) << "asks anew";
  await([&] { return asks_->ask(process_, kGroup).answered_ns != before; });
  EXPECT_EQ(watch_->look(now_ += kSecond / 10, true).message(), "why");
}

// It can't tell rank 0 when its writes have ceased.
TEST_F(Watched, OneThatHasLostThisRankIsNotWaitedFor) {
  answers_->left(kGroup, 0, "rank 0 is lost", 0);
  watch(0);
  EXPECT_EQ(look_until(2.5).message(), "rank 0 is lost");
  watch_->find_silent(now_ += kSecond);
  EXPECT_FALSE(remote_->is_silent(1)) << "its last bytes may be on the way";
  watch_->find_silent(now_ += kSecond);
  EXPECT_TRUE(remote_->is_silent(1));
}

TEST_F(Watched, OneThatHasLostAnotherRankIsWaitedFor) {
  answers_->left(kGroup, 0, "rank 2 is lost", 2);
  watch(0);
  EXPECT_EQ(look_until(2.5).message(), "rank 2 is lost");
  for (int turn = 0; turn < 3; ++turn) watch_->find_silent(now_ += kSecond);
  EXPECT_FALSE(remote_->is_silent(1));
}

TEST_F(Watched, OneThatHasSentWhatDoesNotArriveIsLost) {
  watch(0);
  for (int answer = 0; answer < 2; ++answer) watch_->on_sent_all(1, 1);
  EXPECT_TRUE(look_until(5).ok()) << "a later fragment is not the one that lacks bytes";
  watch_->on_sent_all(1, 0);
  EXPECT_TRUE(look_until(10).ok()) << "this rank may not have looked for them since";
  watch_->on_sent_all(1, 0);
  Status lost = look_until(10.5);
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_TRUE(says(lost, "it has sent all, and not all has arrived"));
  EXPECT_EQ(state(), Connection::State::kLost);
  EXPECT_TRUE(says(watch_->connection(1, now_).why, "it has sent all"));
}

// Each fragment in flight asks, and is answered.
TEST_F(Watched, OneThatHasSentSeveralOfWhichNoneArrivesIsLost) {
  fragments_.add(make_allgather(*context_, op_, 1, 0, 1));
  fragments_.advance()->start();
  watch(0);
  for (int answer = 0; answer < 2; ++answer) {
    for (uint64_t seq : {0, 1}) watch_->on_sent_all(1, seq);
  }
  EXPECT_TRUE(says(look_until(2.5), "it has sent all, and not all has arrived"));
}

TEST_F(Watched, WhatHasLeftMayBeOnTheWayForAMoment) {
  watch(0);
  for (int answer = 0; answer < 2; ++answer) watch_->on_sent_all(1, 0);
  EXPECT_TRUE(look_until(1.9).ok());
  arrive(1);
  EXPECT_TRUE(look_until(10).ok()) << "more of it has come since it said so";
  for (int answer = 0; answer < 2; ++answer) watch_->on_sent_all(1, 0);
  EXPECT_FALSE(look_until(10.5).ok());
}

TEST_F(Watched, OneWhoseConnectionBrokeIsLostAlsoIfItCanNotBeAsked) {
  watch_.emplace(kGroup, members_, *remote_, fragments_, LivenessOfRanks{}, 0);
  begin_ = now_;
  watch_->on_lost(remote_->peer(1), {Code::kPeerLost, "reset"});
  EXPECT_TRUE(look_until(2.9).ok());
  EXPECT_TRUE(says(look_until(3.5), "the connection to it broke: reset"));
}

TEST_F(Watched, OneWhoseConnectionBrokeBeforeTheGroupWasMadeIsLost) {
  own_->give_up(remote_->peer(1), "for another group");
  watch(0);
  EXPECT_TRUE(says(look_until(5), "the connection to it broke: it was lost before"));
}

// In a group of many hosts this rank's flow to the other one waits for its turn.
TEST_F(Watched, OneThatHasSentWhatArrivedIsWaitedForUntilThisRankHasSentToIt) {
  watch(0);
  arrive(kBytes);
  for (int answer = 0; answer < 2; ++answer) watch_->on_sent_all(1, 0);
  Status status = look_until(100);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST_F(Watched, OneThatCanNotBeReachedByALimitOfThisRankIsNotBlamed) {
  watch(0);
  watch_->on_lost(remote_->peer(1), {Code::kUnavailable, "no file is left"});
  Status status = look_until(0.5);
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_EQ(status.message().find("rank 0 (A) can't send to rank 1 (B) during"), 0u)
      << status.message();
  EXPECT_TRUE(says(status, ": no file is left. Raise the limits"));
}

}  // namespace
}  // namespace smddp
