// How groups are made: the rank information, the exchanges over the store, the descriptors; and how
// a rank treats bytes that do not belong to its group. tests/fuzz/rank_info.cc has arbitrary bytes.
#include <barrier>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "joining/rank_table.h"
#include "joining/rendezvous.h"
#include "transport/ofi/open.h"
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
  info.doorbell_fd = 6;
  info.outbox_fd = 7;
  info.routes = 88;
  info.network = {99, true};
  info.fabric = {FabricAddress::State::kOpen, {1, 2, 3}, ""};
  return info;
}

TEST(RankInfo, IsTheSameAfterEncodingAndDecoding) {
  auto read = decode<RankInfo>(encode(a_rank_info()));
  ASSERT_TRUE(read.ok());
  EXPECT_TRUE(read.value() == a_rank_info());
}

TEST(RankInfo, AFabricAddressCanBeEncodedAlone) {
  auto blob = encode(FabricAddress{FabricAddress::State::kUnavailable, {}, "no libfabric"});
  auto read = decode<FabricAddress>(blob);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read.value().state, FabricAddress::State::kUnavailable);
  EXPECT_EQ(read.value().reason, "no libfabric");
  for (size_t size = 0; size < blob.size(); ++size) {
    EXPECT_FALSE(
        decode<FabricAddress>({blob.begin(), blob.begin() + static_cast<std::ptrdiff_t>(size)})
            .ok());
  }
  blob[0] = 3;  // no such state
  EXPECT_FALSE(decode<FabricAddress>(blob).ok());
}

TEST(RankInfo, AnyTruncationIsAnError) {
  auto whole = encode(a_rank_info());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(
        decode<RankInfo>({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}).ok());
  }
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

TEST(RankTable, WhoHandsItOnCanBeEncoded) {
  auto leader = decode<HostLeader>(encode(HostLeader{5, 8, a_rank_info()}));
  ASSERT_TRUE(leader.ok());
  EXPECT_EQ(leader.value().rank, 5);
  EXPECT_EQ(leader.value().ranks, 8);
  EXPECT_EQ(leader.value().info.pid, 42);
  auto handed = decode<HandedTable>(encode(HandedTable{7, 1 << 20}));
  ASSERT_TRUE(handed.ok());
  EXPECT_EQ(handed.value().fd, 7);
  EXPECT_EQ(handed.value().bytes, 1u << 20);
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

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    ::setenv(name, value, 1);
  }
  ~Variable() { old_.empty() ? ::unsetenv(name_) : ::setenv(name_, old_.c_str(), 1); }

 private:
  const char* name_;
  std::string old_;
};

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
  size_t keys = 0;  // that are left
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
      Group::Options options;
      options.name = "test";
      options.timeout_ns = 20'000'000'000;
      options.host = std::string("host-") + how.layout[static_cast<size_t>(r)];
      options.several_hosts = how.several_hosts;
      options.few_ranks = how.few_ranks;
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
  joined.keys = store.keys();
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

void expect_only_the_hosts_keys(const Joined& joined, size_t keys) {
  for (const Status& status : joined.status) EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(joined.keys, keys);
}

// Of each of several hosts that it has joined, and the count of its first rank. Of a large group that all hosts
// have joined, and the count of rank 0.
TEST(Exchanges, NoRanksInformationStaysInTheStore) {
  expect_only_the_hosts_keys(join({.layout = "AAA"}), 0);
  expect_only_the_hosts_keys(join({.layout = "ABBA"}), 4);
  expect_only_the_hosts_keys(join({.layout = "AAA", .few_ranks = 1}), 1);
  expect_only_the_hosts_keys(join({.layout = "ABBA", .few_ranks = 1}), 5);
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

int open_descriptors() {
  int count = 0;
  for (auto it = std::filesystem::directory_iterator("/proc/self/fd");
       it != std::filesystem::directory_iterator(); ++it) {
    ++count;
  }
  return count;
}

// Once the ranks that have met have asked one another whether they live.
int lasting_descriptors() {
  int least = open_descriptors();
  for (int unchanged = 0; unchanged < 20; ++unchanged) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    int now = open_descriptors();
    if (std::exchange(least, now) != now) unchanged = 0;
  }
  return least;
}

TEST(Descriptors, AGroupKeepsNoneOpen) {
  int first = 0;
  auto after = [&](int rank, Process&, int groups) {
    if (rank != 0) return;
    if (groups == 1) first = lasting_descriptors();
    EXPECT_EQ(open_descriptors(), first);
  };
  expect_exchanges(join({.layout = "AABB", .after = after, .groups = 20}), 1, {0, 2});
  EXPECT_GT(first, 0);
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

TEST(Host, ARankThatCouldNotJoinTellsItsNeighbors) {
  MemoryStore store;
  on_threads(2, [&](int r) {
    auto process = Process::create();
    Group::Options options;
    options.name = "test";
    options.timeout_ns = 20'000'000'000;
    options.host = "host-A";
    CountingStore plain(store, "");
    ForgingStore forging(store, "");
    auto group = Group::create(*process.value(), r == 0 ? forging : plain, r, 2, options);
    ASSERT_FALSE(group.ok());
    EXPECT_NE(group.status().code(), Code::kTimeout);
    EXPECT_TRUE(says(group.status(), r == 0 ? "rank 1" : "rank 0"));
  });
}

// The sentence of a rank that can't make a large group, on all ranks.
void expect_all_say(const std::vector<Status>& made, const std::string& words) {
  for (const Status& status : made) {
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(says(status, words));
  }
}

// The ranks but `absent` make a group as a large one is made.
std::vector<Status> make_large_group(const std::string& layout, int absent,
                                     const std::function<std::unique_ptr<Store>(Store&, int)>& view,
                                     std::chrono::milliseconds timeout) {
  MemoryStore store(timeout);
  std::vector<Status> made;
  std::vector<std::future<Status>> ranks;
  for (int r = 0; r < static_cast<int>(layout.size()); ++r) {
    if (r == absent) continue;
    ranks.push_back(std::async(std::launch::async, [&, r] {
      auto process = Process::create();
      Group::Options options;
      options.name = "test";
      options.timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
      options.host = std::string("host-") + layout[static_cast<size_t>(r)];
      options.few_ranks = 1;
      auto own = view(store, r);
      return Group::create(*process.value(), *own, r, static_cast<int>(layout.size()), options)
          .status();
    }));
  }
  for (auto& rank : ranks) made.push_back(rank.get());
  return made;
}

std::unique_ptr<Store> plain(Store& store, int) {
  return std::make_unique<CountingStore>(store, "");
}

TEST(LargeGroups, ARankThatNeverComesIsNamedByAll) {
  for (int absent : {0, 1, 2, 3}) {
    auto made = make_large_group("AABB", absent, plain, std::chrono::seconds(1));
    expect_all_say(made, "ranks " + std::to_string(absent) + " did not join the group in time");
  }
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
  auto view = [](Store& store, int rank) -> std::unique_ptr<Store> {
    if (rank == 2) return std::make_unique<OtherVersion>(store, "");
    return plain(store, rank);
  };
  expect_all_say(make_large_group("ABBA", -1, view, std::chrono::seconds(20)), "another version");
}

class NoSink : public transport::Sink {
  void on_message(const std::byte*, size_t) override {}
  void on_peer_lost(transport::Peer, const Status&) override {}
};

// A process that knows the address but not the key sends random bytes, valid headers of no group,
// and an abort. The group goes on and uses none of it.
TEST(ForeignMessages, ChangeNothing) {
  run_world("AB", [](RankContext& c) {
    std::vector<int> in(100, c.rank), out(200);
    ASSERT_TRUE(c.run(gather_of(in, out, 2)).ok());
    if (c.rank == 0) {
      auto foreign = ofi::open();
      ASSERT_TRUE(foreign.ok());
      auto peer = foreign.value()->add_peer(c.process.open_fabric()->facts().address);
      ASSERT_TRUE(peer.ok());
      NoSink sink;
      std::mt19937 random(5);
      for (int i = 0; i < 60; ++i) {
        transport::MessageBuffer* buffer = nullptr;
        while ((buffer = foreign.value()->acquire(peer.value(), false)) == nullptr) {
          (void)foreign.value()->poll(sink);
          c.engine.kick(c.engine.lock());
        }
        size_t size = sizeof(wire::Header) + random() % 1000;
        for (size_t b = 0; b < size; ++b) buffer->data[b] = static_cast<std::byte>(random());
        if (i % 3 != 0) {
          wire::Header header{};
          header.magic = wire::kMagic;
          header.type = i % 3 == 1 ? wire::Type::kData : wire::Type::kAbort;
          header.bytes = size - sizeof header;
          header.seq = static_cast<uint64_t>(i);
          std::memcpy(buffer->data, &header, sizeof header);
        }
        foreign.value()->post(buffer, size);
      }
      for (int turn = 0; turn < 2000 && !foreign.value()->idle(); ++turn) {
        (void)foreign.value()->poll(sink);
        c.engine.kick(c.engine.lock());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_TRUE(foreign.value()->idle());
    }
    for (int i = 0; i < 20; ++i) {
      std::fill(in.begin(), in.end(), c.rank + i);
      Status status = c.run(gather_of(in, out, 2));
      ASSERT_TRUE(status.ok()) << status.message();
      for (size_t j = 0; j < out.size(); ++j) ASSERT_EQ(out[j], static_cast<int>(j / 100) + i);
    }
    if (c.rank == 0) EXPECT_GT(c.process.refused(), 0u);
  });
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

TEST(Rendezvous, LeavesANumberPerRankInTheStore) {
  MemoryStore store;
  for (int making = 0; making < 3; ++making) {
    ASSERT_TRUE(meet(store, 4)[0].ok());
    EXPECT_EQ(store.keys(), 4u);
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

TEST(Rendezvous, TheErrorNamesTheRanksThatDidNotCome) {
  MemoryStore fresh(std::chrono::milliseconds(200));
  auto alone = Rendezvous(fresh, 0, 3, std::chrono::milliseconds(200)).meet();
  ASSERT_FALSE(alone.ok());
  EXPECT_EQ(alone.status().code(), Code::kTimeout);
  EXPECT_TRUE(says(alone.status(), "ranks 1, 2 did not join"));
  auto waiting = Rendezvous(fresh, 2, 3, std::chrono::milliseconds(200)).meet();
  ASSERT_FALSE(waiting.ok());
  EXPECT_TRUE(says(waiting.status(), "ranks 1 did not join"));

  MemoryStore used(std::chrono::milliseconds(200));
  ASSERT_TRUE(meet(used, 3)[0].ok());
  auto again = Rendezvous(used, 0, 3, std::chrono::milliseconds(200)).meet();
  ASSERT_FALSE(again.ok());
  EXPECT_TRUE(says(again.status(), "ranks 1 did not join"));
  auto without_first = Rendezvous(used, 1, 3, std::chrono::milliseconds(200)).meet();
  ASSERT_FALSE(without_first.ok());
  EXPECT_TRUE(says(without_first.status(), "ranks 0 did not join"));
}

}  // namespace
}  // namespace smddp
