// How groups are made: the rank information, the exchanges over the store.
// tests/fuzz/rank_info.cc has arbitrary bytes.
#include <barrier>
#include <cstdlib>
#include <future>
#include <optional>
#include <set>
#include <thread>

#include "debug_setting.h"
#include "joining/process_directory.h"
#include "joining/rank_table.h"
#include "joining/rendezvous.h"
#include "world.h"

namespace smddp {
namespace {

RankInfo a_rank_info() {
  RankInfo info;
  info.host = "identity";
  info.host_name = "name";
  info.key[3] = 7;
  info.has_secret = true;
  info.proof = 77;
  info.drawn = {5, 6};
  info.token = 0x1234567890abcdef;
  info.pid = 42;
  info.presence_fd = 5;
  info.wake_fd = 6;
  info.outbox_fd = 7;
  info.routes = 88;
  info.network = {99, true};
  info.fabric = {FabricAddress::State::kOpen, {1, 2, 3}, ""};
  return info;
}

// What was encoded, as it is read again. No part of it can be read.
template <class T>
T read_again(const T& told) {
  const Blob whole = encode(told);
  auto read = decode<T>(whole);
  EXPECT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(encode(read.value()), whole);
  for (size_t size = 0; size < whole.size(); ++size) {
    Blob part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_FALSE(decode<T>(part).ok()) << size;
  }
  return std::move(read.value());
}

TEST(Encoding, EachFieldIsTheSameAfterDecoding) {
  EXPECT_TRUE(read_again(a_rank_info()) == a_rank_info());
  FabricAddress none =
      read_again(FabricAddress{FabricAddress::State::kUnavailable, {}, "no libfabric"});
  EXPECT_EQ(none.state, FabricAddress::State::kUnavailable);
  EXPECT_EQ(none.reason, "no libfabric");
  Blob unknown = encode(none);
  unknown[0] = 3;  // no such state
  EXPECT_FALSE(decode<FabricAddress>(unknown).ok());
  HostLeader leader = read_again(HostLeader{5, 8, a_rank_info()});
  EXPECT_EQ(leader.rank, 5);
  EXPECT_EQ(leader.ranks, 8);
  EXPECT_EQ(leader.info.pid, 42);
  HandedTable handed = read_again(HandedTable{7, 1 << 20});
  EXPECT_EQ(handed.fd, 7);
  EXPECT_EQ(handed.bytes, 1u << 20);
  Reference reference = read_again(Reference{7, -3, a_rank_info()});
  EXPECT_EQ(reference.directory, 7u);
  EXPECT_EQ(reference.offset, -3);
  EXPECT_EQ(reference.part.proof, 77u);
  EXPECT_EQ(reference.part.outbox_fd, 7);
  EXPECT_FALSE(is_reference(encode(a_rank_info())));
  EXPECT_FALSE(decode<Reference>(encode(a_rank_info())).ok());
}

TEST(RankInfo, TheErrorForAnotherVersionSaysSo) {
  auto blob = encode(a_rank_info());
  ++blob[0];
  auto read = decode<RankInfo>(blob);
  ASSERT_FALSE(read.ok());
  EXPECT_TRUE(says(read.status(), "version"));
}

// --- the table of all ranks' information ----------------------------------------------------------------

std::vector<Blob> a_table() {
  std::vector<Blob> blobs;
  for (int r = 0; r < 20; ++r) {
    RankInfo info = a_rank_info();
    info.host = std::string(static_cast<size_t>(r / 8) * 150, 'h');
    info.pid = 1000 + r;
    info.fabric.address.resize(static_cast<size_t>(r) * 40, static_cast<uint8_t>(r));
    blobs.push_back(encode(info));
  }
  blobs.insert(blobs.begin() + 3, Blob());
  return blobs;
}

TEST(RankTable, IsTheSameAfterPackingAndUnpacking) {
  auto read = unpack_table(pack_table(a_table()));
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value(), a_table());
  EXPECT_TRUE(unpack_table(pack_table({})).value().empty());
}

TEST(RankTable, TakesLittleForWhatRanksHaveInCommon) {
  std::vector<Blob> alike(100, encode(a_rank_info()));
  EXPECT_LT(pack_table(alike).size(), 2 * alike[0].size() + 10 * alike.size());
}

TEST(RankTable, AnyTruncationHasFewerBlobsOrIsAnError) {
  Blob whole = pack_table(a_table());
  for (size_t size = 0; size < whole.size(); ++size) {
    auto read = unpack_table({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)});
    if (read.ok()) EXPECT_LT(read.value().size(), a_table().size());
  }
}

TEST(Failures, TheFirstIsTheCauseOfTheOthers) {
  MemoryStore store(std::chrono::seconds(1));
  EXPECT_TRUE(published_failure(store).ok());
  publish_failure(store, {Code::kUnavailable, "the cause"});
  publish_failure(store, {Code::kTimeout, "a consequence"});
  Status failure = published_failure(store);
  EXPECT_EQ(failure.code(), Code::kUnavailable);
  EXPECT_EQ(failure.message(), "the cause");
  auto collected = collect(store, "topic", {0, 1});
  EXPECT_EQ(collected.status().message(), "the cause");
}

// --- exchanges over the store --------------------------------------------------------------------

Group::Options options_of(const std::string& layout, int rank, std::chrono::nanoseconds timeout,
                          int few_ranks) {
  Group::Options options;
  options.name = "test";
  options.timeout_ns = static_cast<uint64_t>(timeout.count());
  options.host = std::string("host-") + layout[static_cast<size_t>(rank)];
  options.few_ranks = few_ranks;
  return options;
}

struct Join {
  std::string layout;
  bool several_hosts = false;
  std::function<void(int rank, Process&)> before = [](int, Process&) {};
  // Called with the number of groups made so far, by all ranks at the same time.
  std::function<void(int rank, Process&, int groups)> after = [](int, Process&, int) {};
  int groups = 1;
  int few_ranks = 32;  // 1: as in a group of many
};

struct Joined {
  std::vector<CountingStore> stores;  // of each rank's last group
  std::vector<Status> status;
};

// Makes groups over ranks that are threads, with an engine each, and returns the results of the
// last group.
Joined join(const Join& how) {
  MemoryStore store;
  auto ranks = static_cast<int>(how.layout.size());
  Joined joined;
  joined.status.resize(how.layout.size());
  for (int r = 0; r < ranks; ++r) {
    joined.stores.emplace_back(store, std::to_string(how.groups - 1) + "/");
  }
  std::barrier all(ranks);
  on_threads(ranks, [&](int r) {
    auto process = Process::create();
    how.before(r, *process.value());
    all.arrive_and_wait();
    std::vector<std::unique_ptr<Group>> groups;
    for (int i = 0; i < how.groups; ++i) {
      Group::Options options = options_of(how.layout, r, std::chrono::seconds(20), how.few_ranks);
      options.several_hosts = how.several_hosts;
      CountingStore earlier(store, std::to_string(i) + "/");
      bool last = i + 1 == how.groups;
      auto group =
          Group::create(*process.value(), last ? joined.stores[static_cast<size_t>(r)] : earlier, r,
                        ranks, options);
      joined.status[static_cast<size_t>(r)] = group.status();
      if (group.ok()) groups.push_back(std::move(group.value()));
      all.arrive_and_wait();
      how.after(r, *process.value(), i + 1);
      all.arrive_and_wait();
    }
  });
  return joined;
}

// `hosts`: the first rank of each, if there are several. They say in a further exchange that their host has
// joined, and all ranks wait for that.
void expect_exchanges(const Joined& joined, int exchanges, const std::vector<size_t>& hosts = {}) {
  for (size_t r = 0; r < joined.stores.size(); ++r) {
    bool first = std::find(hosts.begin(), hosts.end(), r) != hosts.end();
    EXPECT_TRUE(joined.status[r].ok()) << joined.status[r].message();
    EXPECT_EQ(joined.stores[r].sets, exchanges + (first ? 1 : 0));
    EXPECT_EQ(joined.stores[r].gets, exchanges + (hosts.empty() ? 0 : 1));
    if (hosts.empty()) EXPECT_EQ(joined.stores[r].looks, 0);  // else with pauses, for each host
  }
}

TEST(Exchanges, OneHostTakesOneAndOpensNoFabric) {
  auto after = [](int, Process& process, int) { EXPECT_EQ(process.open_fabric(), nullptr); };
  expect_exchanges(join({.layout = "AAA", .after = after}), 1);
}

TEST(Exchanges, SeveralHostsTakeOneIfTheyAreExpected) {
  expect_exchanges(join({.layout = "ABBA", .several_hosts = true}), 1, {0, 1});
}

TEST(Exchanges, TheLaunchersVariablesAnnounceSeveralHosts) {
  Variable world("WORLD_SIZE", "4");
  {
    Variable local("LOCAL_WORLD_SIZE", "2");
    expect_exchanges(join({.layout = "ABBA"}), 1, {0, 1});
  }
  {
    Variable local("LOCAL_SIZE", "2");
    expect_exchanges(join({.layout = "ABBA"}), 1, {0, 1});
  }
  Variable local("LOCAL_WORLD_SIZE", "4");
  auto after = [](int, Process& process, int) { EXPECT_EQ(process.open_fabric(), nullptr); };
  expect_exchanges(join({.layout = "AAAA", .after = after}), 1);
}

TEST(Exchanges, SeveralHostsThatAreNotExpectedTakeTwo) {
  expect_exchanges(join({.layout = "ABBA"}), 2, {0, 1});
}

TEST(Exchanges, AFurtherGroupTakesOne) {
  expect_exchanges(join({.layout = "ABBA", .groups = 2}), 1, {0, 1});
}

TEST(Exchanges, OnlyRanksWithoutAnOpenFabricPublishAgain) {
  auto before = [](int rank, Process& process) {
    if (rank != 2) ASSERT_TRUE(process.fabric().ok());
  };
  Joined joined = join({.layout = "ABBA", .before = before});
  for (int r = 0; r < 4; ++r) {
    EXPECT_TRUE(joined.status[static_cast<size_t>(r)].ok());
    EXPECT_EQ(joined.stores[static_cast<size_t>(r)].sets, (r == 2 ? 2 : 1) + (r < 2 ? 1 : 0));
    EXPECT_EQ(joined.stores[static_cast<size_t>(r)].gets, 3);
  }
}

// The most that the ranks of a large group read, as in the picture of info_exchange.h: rank 0 one value per rank
// and per host; the first rank of each other host rank 0's information, its host's and the table; the others the
// place of the table instead; each one that all hosts have joined.
TEST(Exchanges, InALargeGroupNoRankButTheFirstReadsAValuePerRank) {
  for (bool expected : {true, false}) {
    Joined joined = join({.layout = "AABBCCBA", .several_hosts = expected, .few_ranks = 1});
    int topics = expected ? 1 : 2;
    for (size_t r = 0; r < joined.stores.size(); ++r) {
      EXPECT_TRUE(joined.status[r].ok()) << joined.status[r].message();
      bool host_of_first = r == 1 || r == 7;
      int most = r == 0 ? topics * 7 + 2 : (host_of_first ? 2 : 3) + topics;
      EXPECT_EQ(joined.stores[r].values, most) << "rank " << r;
    }
  }
  Joined one_host = join({.layout = "AAAA", .few_ranks = 1});
  for (size_t r = 0; r < 4; ++r) EXPECT_EQ(one_host.stores[r].values, r == 0 ? 3 : 2);
}

TEST(Exchanges, ALargeGroupOfRanksOfOneHostEachHandsOnNothing) {
  Joined joined = join({.layout = "ABC", .several_hosts = true, .few_ranks = 1});
  for (size_t r = 0; r < 3; ++r) {
    EXPECT_TRUE(joined.status[r].ok()) << joined.status[r].message();
    EXPECT_EQ(joined.stores[r].written.count("rank_info/handed/" + std::to_string(r)), 0u);
  }
}

TEST(Exchanges, ARankWithoutFabricTellsAllRanksWhy) {
  for (auto [expected, few_ranks] : {std::pair(true, 32), {false, 32}, {true, 1}, {false, 1}}) {
    std::barrier opened(4);
    std::optional<Variable> nowhere;
    auto before = [&](int rank, Process& process) {
      if (rank != 1) ASSERT_TRUE(process.fabric().ok());
      opened.arrive_and_wait();
      if (rank == 1) nowhere.emplace("SMDDP_FABRIC_INTERFACE", "nowhere0");
    };
    Joined joined = join(
        {.layout = "ABBA", .several_hosts = expected, .before = before, .few_ranks = few_ranks});
    for (const Status& status : joined.status) {
      ASSERT_FALSE(status.ok());
      EXPECT_TRUE(says(status, "rank 1 (host-B) has no fabric"));
      EXPECT_TRUE(says(status, "nowhere0"));
    }
  }
}

// --- a peer that does not join -------------------------------------------------------------------

// Gives a rank another descriptor for its neighbor's segment than the neighbor published.
class ForgingStore : public CountingStore {
 public:
  using CountingStore::CountingStore;
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    auto values = CountingStore::get(keys, stop);
    if (!keys[0].starts_with("rank_info")) return values;
    RankInfo info = decode<RankInfo>(values.value()[1]).value();
    info.outbox_fd = -1;
    values.value()[1] = encode(info);
    return values;
  }
};

// The ranks but `absent` make a group; few_ranks = 1: as a large one is made.
std::vector<Status> make_group(const std::string& layout, int absent,
                               const std::function<std::unique_ptr<Store>(Store&, int)>& view,
                               std::chrono::milliseconds timeout, int few_ranks = 1) {
  MemoryStore store(timeout);
  std::vector<Status> made;
  std::vector<std::future<Status>> ranks;
  for (int r = 0; r < static_cast<int>(layout.size()); ++r) {
    if (r == absent) continue;
    ranks.push_back(std::async(std::launch::async, [&, r] {
      auto process = Process::create();
      auto own = view(store, r);
      return Group::create(*process.value(), *own, r, static_cast<int>(layout.size()),
                           options_of(layout, r, timeout, few_ranks))
          .status();
    }));
  }
  for (auto& rank : ranks) made.push_back(rank.get());
  return made;
}

// As `S` on one rank, plain on all others.
template <class S>
auto view_of_rank(int rank) {
  return [rank](Store& store, int r) -> std::unique_ptr<Store> {
    if (r == rank) return std::make_unique<S>(store, "");
    return std::make_unique<CountingStore>(store, "");
  };
}

void expect_all_say(const std::vector<Status>& made, const std::string& words) {
  for (const Status& status : made) {
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(says(status, words));
  }
}

TEST(Host, ARankThatCouldNotJoinTellsItsNeighbors) {
  auto made = make_group("AA", -1, view_of_rank<ForgingStore>(0), std::chrono::seconds(20), 32);
  for (size_t r : {0, 1}) {
    ASSERT_FALSE(made[r].ok());
    EXPECT_NE(made[r].code(), Code::kTimeout);
    EXPECT_TRUE(says(made[r], r == 0 ? "rank 1" : "rank 0"));
  }
}

TEST(LargeAndSmallGroups, ARankThatNeverComesIsNamedByAll) {
  on_threads(8, [](int i) {
    int absent = i % 4, few_ranks = i < 4 ? 1 : 32;
    auto made = make_group("AABB", absent, view_of_rank<CountingStore>(0), std::chrono::seconds(1),
                           few_ranks);
    expect_all_say(made, "ranks " + std::to_string(absent) + " did not join the group in time");
  });
}

TEST(LargeGroups, ARankOfAnotherVersionIsAnErrorOfAll) {
  class OtherVersion : public CountingStore {
   public:
    using CountingStore::CountingStore;
    Status set(const std::string& key, const std::vector<uint8_t>& value) override {
      std::vector<uint8_t> other = value;
      if (key.starts_with("rank_info/")) ++other[0];
      return CountingStore::set(key, other);
    }
  };
  expect_all_say(make_group("ABBA", -1, view_of_rank<OtherVersion>(2), std::chrono::seconds(20)),
                 "another version");
}

// --- the rendezvous -------------------------------------------------------------------------------

std::vector<Result<std::string>> meet(
    Store& store, int ranks, std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  std::vector<std::future<Result<std::string>>> meetings;
  for (int rank = 0; rank < ranks; ++rank) {
    meetings.push_back(std::async(
        std::launch::async, [&, rank] { return Rendezvous(store, rank, ranks, timeout).meet(); }));
  }
  std::vector<Result<std::string>> names;
  for (auto& meeting : meetings) names.push_back(meeting.get());
  return names;
}

TEST(Rendezvous, RanksOfOneMakingGetOneNameAndEachMakingAnother) {
  MemoryStore store;
  std::set<std::string> names;
  for (int ranks : {3, 2, 1, 4, 3}) {  // as torchrun restarts ranks over one store
    auto met = meet(store, ranks);
    for (const auto& name : met) {
      ASSERT_TRUE(name.ok()) << name.status().message();
      EXPECT_EQ(name.value(), met[0].value());
    }
    EXPECT_TRUE(names.insert(met[0].value()).second);
  }
}

TEST(Rendezvous, LeavesNothingInTheStore) {
  MemoryStore store;
  for (int making = 0; making < 3; ++making) {
    ASSERT_TRUE(meet(store, 4)[0].ok());
    EXPECT_EQ(store.keys(), 4u);
  }
  for (int rank = 0; rank < 4; ++rank) Rendezvous(store, rank, 4, std::chrono::seconds(1)).forget();
  EXPECT_EQ(store.keys(), 0u);
}

// A job of a year makes 100,000 groups.
TEST(Store, NothingIsLeftOfAGroupThatAllRanksHaveUsed) {
  for (const char* layout : {"AA", "AB", "AABB", "ABC"}) {
    for (int few : {1, 32}) {
      DebugSetting curve("curve", "measure");
      MemoryStore store;
      const std::string hosts = layout;
      on_threads(static_cast<int>(hosts.size()), [&](int rank) {
        auto process = std::move(Process::create().value());
        Group::Options options{.name = "g", .host = hosts.substr(static_cast<size_t>(rank), 1)};
        options.few_ranks = few;
        auto group = Group::create(*process, store, rank, static_cast<int>(hosts.size()), options);
        ASSERT_TRUE(group.ok()) << group.status().message();
        std::vector<int> in(10), out(in.size() * hosts.size());
        for (auto op : {broadcast_of(in, 0, static_cast<int>(hosts.size())),
                        gather_of(in, out, static_cast<int>(hosts.size()))}) {
          EXPECT_FALSE(group.value()->made_by_all());
          group.value()->submit(op, {}, false);
          EXPECT_TRUE(process->engine().await(*op).ok());
        }
        EXPECT_TRUE(group.value()->made_by_all());
        for (const std::string& key : group.value()->take_last_keys()) store.remove(key);
      });
      EXPECT_EQ(store.keys(), 0u) << layout << " " << few;
    }
  }
}

TEST(Rendezvous, RanksThatComeInAnyOrderDoNotMeetTheirPredecessors) {
  MemoryStore store;
  for (int late = 0; late < 3; ++late) {
    ASSERT_TRUE(meet(store, 3)[0].ok());
    std::vector<std::string> names(3);
    auto join = [&](int rank) {
      auto name = Rendezvous(store, rank, 3, std::chrono::seconds(20)).meet();
      names[static_cast<size_t>(rank)] = name.ok() ? name.value() : name.status().message();
    };
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != late) ranks.emplace_back(join, rank);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    join(late);
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(names[1], names[0]);
    EXPECT_EQ(names[2], names[0]);
  }
}

TEST(Rendezvous, ARankThatDiedBeforeItMetTheOthersIsNotMissedByItsSuccessor) {
  MemoryStore store;
  ASSERT_TRUE(store.set("arrived/1", std::vector<uint8_t>(8, 1)).ok());
  ASSERT_TRUE(store.set("answered/1", std::vector<uint8_t>(24, 1)).ok());
  auto met = meet(store, 2);
  ASSERT_TRUE(met[0].ok() && met[1].ok());
  EXPECT_EQ(met[0].value(), met[1].value());
}

// Rank 0 is still at the rendezvous, where it waits for rank 2.
TEST(Rendezvous, RankZeroIsNotBlamedForTheRankThatItWaitsFor) {
  MemoryStore store(std::chrono::milliseconds(200));
  ASSERT_TRUE(store.set("topic/1", {1}).ok());
  EXPECT_TRUE(says(collect(store, "topic", {0, 1, 2}).status(), "ranks 2 did not join"));
  EXPECT_TRUE(says(collect(store, "topic", {0, 1}).status(), "ranks 0 did not join"));
}

TEST(Rendezvous, TheErrorNamesTheRanksThatDidNotCome) {
  constexpr std::chrono::milliseconds kSoon(200);
  auto expect_missing = [&](Store& store, int rank, const std::string& missing) {
    auto alone = Rendezvous(store, rank, 3, kSoon).meet();
    EXPECT_EQ(alone.status().code(), Code::kTimeout);
    EXPECT_TRUE(says(alone.status(), "ranks " + missing + " did not join"));
  };
  MemoryStore fresh(kSoon), used(kSoon);
  expect_missing(fresh, 0, "1, 2");
  expect_missing(fresh, 2, "1");
  ASSERT_TRUE(meet(used, 3)[0].ok());
  expect_missing(used, 0, "1");
  expect_missing(used, 1, "0");
}

}  // namespace
}  // namespace smddp
