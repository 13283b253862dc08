// Which group gets a message, what becomes of messages of groups that a rank has not made yet, and when the
// endpoint is closed.
#include "progress/groups.h"
#include "transport/ofi/open.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "common/signature.h"
#include "progress/early_messages.h"
#include "progress/network.h"
#include "results.h"

namespace smddp {
namespace {

JobKey key_of(uint8_t group) {
  JobKey key{};
  key[0] = group;
  return key;
}

void keep(EarlyMessages& early, wire::Type type, uint8_t group, uint64_t seq,
          const std::string& payload = "") {
  wire::Header header{};
  header.magic = wire::kMagic;
  header.type = type;
  header.key = key_of(group);
  header.seq = seq;
  header.bytes = static_cast<uint32_t>(payload.size());
  early.keep(header, reinterpret_cast<const std::byte*>(payload.data()));
}

TEST(EarlyMessages, AreHandedOutOncePerGroupInTheirOrder) {
  EarlyMessages early;
  keep(early, wire::Type::kReady, 1, 10);
  keep(early, wire::Type::kReady, 2, 20);
  keep(early, wire::Type::kAbort, 1, 11, "why");
  auto first = early.take(key_of(1));
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first[0].header.seq, 10u);
  EXPECT_TRUE(first[0].payload.empty());
  EXPECT_EQ(first[1].header.seq, 11u);
  ASSERT_EQ(first[1].payload.size(), 3u);
  EXPECT_EQ(std::memcmp(first[1].payload.data(), "why", 3), 0);
  EXPECT_TRUE(early.take(key_of(1)).empty());
  EXPECT_EQ(early.take(key_of(2)).size(), 1u);
  EXPECT_EQ(early.dropped(), 0u);
}

TEST(EarlyMessages, DataAndLongMessagesAreDropped) {
  EarlyMessages early;
  keep(early, wire::Type::kData, 1, 0);
  keep(early, wire::Type::kAbort, 1, 0, std::string(kReasonBytes + 1, 'x'));
  EXPECT_EQ(early.dropped(), 2u);
  keep(early, wire::Type::kAbort, 1, 0, std::string(kReasonBytes, 'x'));
  EXPECT_EQ(early.dropped(), 2u);
  EXPECT_EQ(early.take(key_of(1)).size(), 1u);
}

TEST(EarlyMessages, TheOldestIsDroppedIfThereAreTooMany) {
  EarlyMessages early;
  constexpr uint64_t kMost = EarlyMessages::kMostBytes / sizeof(wire::Header);
  for (uint64_t seq = 0; seq < kMost + 4; ++seq) keep(early, wire::Type::kReady, 1, seq);
  EXPECT_EQ(early.dropped(), 4u);
  auto messages = early.take(key_of(1));
  ASSERT_EQ(messages.size(), kMost);
  EXPECT_EQ(messages.front().header.seq, 4u);
  EXPECT_EQ(messages.back().header.seq, kMost + 3);
}

// A rank that makes a group later than the others gets a READY of each fragment in flight, eight at most, from
// each of its peers. One that is dropped comes again with a reminder only, a second later.
TEST(EarlyMessages, ThoseOfManyPeersAreAllKept) {
  EarlyMessages early;
  for (uint64_t peer = 0; peer < 4095; ++peer) {
    for (uint64_t seq = 0; seq < 8; ++seq)
      keep(early, wire::Type::kReady, 1, seq, std::string(64, 'g'));
  }
  EXPECT_EQ(early.dropped(), 0u);
  EXPECT_EQ(early.take(key_of(1)).size(), 8u * 4095);
}

// A group that only counts, or throws.
struct CountingGroup : Progressable {
  bool busy() const override { return is_busy; }
  bool progress() override {
    if (order != nullptr) order->push_back(this);
    if (throws) throw std::bad_alloc();
    return ++progressed > 0;
  }
  bool watch(uint64_t) override { return ++watched > 0; }
  uint64_t deadline_ns() const override { return deadline; }
  bool on_message(const wire::Header& header, const std::byte*) override {
    messages.push_back(header.seq);
    return authentic;
  }
  void on_peer_lost(transport::Peer, const Status&) override {
    if (throws) throw 5;
    ++losses;
  }
  void on_fabric_failed(const Status&) override { ++fabric_failures; }
  bool needs_network() const override { return needs; }
  void on_network_closed() override {}
  void fail(Status why) noexcept override { failure = std::move(why); }
  void leave() override { ++left; }

  bool is_busy = false, throws = false, authentic = true, needs = false;
  std::vector<CountingGroup*>* order = nullptr;  // of the calls of progress(), among groups
  Status failure;
  int fabric_failures = 0;
  uint64_t deadline = UINT64_MAX;
  int progressed = 0, watched = 0, losses = 0, left = 0;
  std::vector<uint64_t> messages;
};

void deliver(Groups& groups, uint8_t group, uint64_t seq, uint32_t magic = wire::kMagic) {
  wire::Header header{};
  header.magic = magic;
  header.type = wire::Type::kReady;
  header.key = key_of(group);
  header.seq = seq;
  transport::Sink& sink = groups;
  sink.on_message(reinterpret_cast<const std::byte*>(&header), sizeof header);
}

TEST(Groups, AMessageGoesToItsGroupEvenIfItCameFirst) {
  Groups groups;
  CountingGroup one, two;
  deliver(groups, 2, 19);
  EXPECT_EQ(groups.foreign_messages(), 1u) << "no group is being made";
  groups.count_making(1);
  groups.attach(key_of(1), &one);
  deliver(groups, 2, 20);
  deliver(groups, 1, 10);
  deliver(groups, 1, 11, 0);
  deliver(groups, 3, 30);
  groups.attach(key_of(2), &two);
  groups.count_making(-1);
  deliver(groups, 2, 21);
  EXPECT_EQ(one.messages, (std::vector<uint64_t>{10}));
  EXPECT_EQ(two.messages, (std::vector<uint64_t>{20, 21}));
  EXPECT_EQ(groups.foreign_messages(), 3u) << "one with another magic number, one of no group";
  groups.detach(key_of(1));
  deliver(groups, 1, 12);
  EXPECT_EQ(one.messages.size(), 1u);
}

TEST(Groups, MessagesThatAreNotAuthenticAreCounted) {
  Groups groups;
  CountingGroup group;
  group.authentic = false;
  groups.count_making(1);
  deliver(groups, 1, 10);
  EXPECT_EQ(groups.foreign_messages(), 0u) << "it may be of a group that is being made";
  groups.attach(key_of(1), &group);
  EXPECT_EQ(groups.foreign_messages(), 1u);
  deliver(groups, 1, 11);
  EXPECT_EQ(groups.foreign_messages(), 2u);
  group.authentic = true;
  deliver(groups, 1, 12);
  EXPECT_EQ(groups.foreign_messages(), 2u);
}

TEST(Groups, OnlyBusyGroupsAreAdvancedAndAllAreToldOfALostPeer) {
  Groups groups;
  CountingGroup idle, busy;
  groups.attach(key_of(1), &idle);
  groups.attach(key_of(2), &busy);
  EXPECT_FALSE(groups.busy());
  EXPECT_FALSE(groups.progress());
  EXPECT_EQ(groups.deadline_ns(), UINT64_MAX);
  busy.is_busy = true;
  busy.deadline = 5;
  EXPECT_TRUE(groups.busy());
  EXPECT_TRUE(groups.progress());
  EXPECT_TRUE(groups.watch(0));
  EXPECT_EQ(groups.deadline_ns(), 5u);
  EXPECT_EQ(idle.progressed + idle.watched, 0);
  EXPECT_EQ(busy.progressed + busy.watched, 2);
  static_cast<transport::Sink&>(groups).on_peer_lost(0, Status());
  groups.leave();
  for (const CountingGroup* group : {&idle, &busy}) {
    EXPECT_EQ(group->losses, 1);
    EXPECT_EQ(group->left, 1);
  }
  groups.detach_all();
  EXPECT_FALSE(groups.busy());
}

TEST(Groups, AnExceptionBreaksTheGroupThatItComesFromAndNoOther) {
  Groups groups;
  CountingGroup good, bad;
  groups.attach(key_of(1), &bad);
  groups.attach(key_of(2), &good);
  good.is_busy = bad.is_busy = bad.throws = true;
  EXPECT_TRUE(groups.progress());
  EXPECT_EQ(good.progressed, 1);
  EXPECT_TRUE(good.failure.ok());
  EXPECT_EQ(bad.failure.message(), "out of memory");
  static_cast<transport::Sink&>(groups).on_peer_lost(0, Status());
  EXPECT_EQ(good.losses, 1);
  EXPECT_EQ(bad.failure.code(), Code::kInternal);
}

TEST(Groups, AnExceptionOfTheEndpointBreaksThoseThatAreBusy) {
  Groups groups;
  CountingGroup idle, busy;
  groups.attach(key_of(1), &idle);
  groups.attach(key_of(2), &busy);
  busy.is_busy = true;
  static_cast<transport::Sink&>(groups).on_exception({Code::kUnavailable, "out of memory"});
  EXPECT_TRUE(idle.failure.ok());
  EXPECT_EQ(busy.failure.message(), "out of memory");
}

// A group that fills all slots of the endpoint in each pass must not always be the first to get them.
TEST(Groups, TakeTurnsToBeTheFirstOfAPass) {
  Groups groups;
  std::vector<CountingGroup*> order;
  std::vector<CountingGroup> three(3);
  for (uint8_t i = 0; i < 3; ++i) {
    three[i].is_busy = true;
    three[i].order = &order;
    groups.attach(key_of(i), &three[i]);
  }
  std::map<CountingGroup*, int> first;
  for (int pass = 0; pass < 30; ++pass) {
    order.clear();
    groups.progress();
    ASSERT_EQ(order.size(), 3u);
    ++first[order[0]];
  }
  for (CountingGroup& group : three) EXPECT_EQ(first[&group], 10);
}

// --- when the endpoint is closed, so that the next group opens a new one

class Endpoints : public testing::Test {
 protected:
  void SetUp() override {
    auto opened = network_.open();
    if (!opened) GTEST_SKIP() << opened.status().message();
    transport_ = opened.value();
  }
  bool closes() {
    std::vector<std::shared_ptr<void>> freed;
    return network_.close_if_worn(groups_, &freed);
  }
  CountingGroup group_;
  Groups groups_;
  Network network_;
  transport::Transport* transport_ = nullptr;
};

TEST_F(Endpoints, AreClosedOnlyIfWornAndNeededByNoGroup) {
  EXPECT_FALSE(closes()) << "nothing is broken";
  network_.wear();
  group_.needs = true;
  groups_.attach(key_of(1), &group_);
  EXPECT_FALSE(closes()) << "a group needs it";
  group_.needs = false;
  group_.is_busy = true;
  EXPECT_TRUE(closes());
  EXPECT_GT(group_.progressed, 0) << "its last words leave first";
  EXPECT_EQ(network_.transport(), nullptr);
  EXPECT_TRUE(network_.open().ok());
  EXPECT_FALSE(closes()) << "it is new";
}

TEST_F(Endpoints, AreWornOnceAPeerIsLost) {
  auto other = value_of(ofi::open());
  auto peer = value_of(transport_->add_peer(other->facts().address));
  transport_->give_up(peer, "asked to");
  EXPECT_TRUE(closes());
}

TEST_F(Endpoints, StayWhileMemoryIsLentToThem) {
  std::vector<std::byte> memory(4096);
  Status lent = network_.lend(memory.data(), memory.size(), {});
  if (!lent) GTEST_SKIP() << lent.message();
  network_.wear();
  EXPECT_FALSE(closes());
  network_.take_back(memory.data());
  EXPECT_TRUE(closes());
}

}  // namespace
}  // namespace smddp
