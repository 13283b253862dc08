// What a process is, told once per job: groups whose ranks stand in one directory of processes, and groups with a
// rank that does not, or whose process has changed since.
#include "joining/process_directory.h"

#include <algorithm>
#include <barrier>
#include <set>
#include <thread>

#include "world.h"

namespace smddp {
namespace {

RankInfo info_of(int rank) {
  RankInfo info;
  info.host = info.host_name = "host-" + std::to_string(rank / 2);
  info.token = 100 + static_cast<uint64_t>(rank);
  info.pid = 1000 + rank;
  info.fabric = {FabricAddress::State::kOpen, std::vector<uint8_t>(40, 7), ""};
  info.outbox_fd = 9;
  info.serial = static_cast<uint32_t>(rank);
  info.key = own_key(info.token, info.serial);
  if (rank == 0) info.drawn = {5, 6};
  return info;
}

std::vector<RankInfo> infos_of(int ranks) {
  std::vector<RankInfo> infos;
  for (int r = 0; r < ranks; ++r) infos.push_back(info_of(r));
  return infos;
}

OwnPlace place_of(int place, uint8_t job = 1) {
  JobKey key{job};
  return {std::make_shared<const ProcessDirectory>(key, infos_of(8)), place, info_of(place)};
}

TEST(RankValues, ReferencesBecomeTheInformationOfTheirRanks) {
  const std::vector<int> members = {3, 7, 4};
  std::vector<Blob> values;
  for (size_t r = 0; r < members.size(); ++r) {
    RankInfo info = info_of(members[r]);
    info.serial = 20;
    info.key = own_key(info.token, info.serial);
    values.push_back(RankValues(static_cast<int>(r), place_of(members[r])).describe(info));
  }
  EXPECT_TRUE(RankValues::unclear(values).empty());
  auto read = RankValues(2, place_of(4)).read_all(values);
  ASSERT_TRUE(read.ok()) << read.status().message();
  for (size_t r = 0; r < members.size(); ++r) {
    EXPECT_EQ(static_cast<ProcessInfo>(read.value()[r]), info_of(members[r]));
    EXPECT_EQ(read.value()[r].key, own_key(100 + static_cast<uint64_t>(members[r]), 20));
  }
  EXPECT_FALSE(RankValues(2, {}).can_read(values[0]));
  EXPECT_FALSE(RankValues(2, place_of(4, 2)).read_all(values).ok());
  auto nowhere = encode(Reference{place_of(4).directory->number(), 5, info_of(3)});
  EXPECT_FALSE(RankValues(2, place_of(4)).read_all({nowhere, nowhere, nowhere, nowhere}).ok());
}

// --- groups -------------------------------------------------------------------------------------

// Ranks as threads. The first group is of all of them; then each makes what the test says.
struct Job {
  struct Rank {
    int rank;
    std::unique_ptr<Process> process;
    std::string host;
    std::vector<std::unique_ptr<Group>> groups;
  };
  Job(const std::string& hosts, int few) : layout(hosts), few_ranks(few) {}

  // What rank `rank` of a group has published in it.
  struct Made {
    int sets = 0;
    size_t bytes = 0;
    bool referred = false, told_whole = false;
    uint32_t serial = 0;  // of a rank that refers
  };

  Made make(Rank& self, const std::string& name, const std::vector<int>& members, bool whole_job) {
    Made made;
    auto at = std::find(members.begin(), members.end(), self.rank);
    if (at == members.end()) return made;
    Group::Options options{.name = name, .timeout_ns = 20'000'000'000, .host = self.host};
    options.few_ranks = few_ranks;
    options.whole_job = whole_job;
    CountingStore view(store, name + "/");
    auto rank = static_cast<int>(at - members.begin()), ranks = static_cast<int>(members.size());
    auto group = Group::create(*self.process, view, rank, ranks, options);
    EXPECT_TRUE(group.ok()) << name << ", rank " << rank << ": " << group.status().message();
    if (!group.ok()) return made;
    std::vector<int> in(5, self.rank), out(in.size() * members.size()), expected;
    for (int member : members) expected.insert(expected.end(), in.size(), member);
    auto op = gather_of(in, out, ranks);
    group.value()->submit(op, {}, false);
    self.process->engine().wait(*op);
    EXPECT_TRUE(op->status().ok()) << op->status().message();
    EXPECT_EQ(out, expected);
    self.groups.push_back(std::move(group.value()));
    made.sets = view.sets;
    const Blob& told = view.written.at("rank_info/" + std::to_string(rank));
    made.bytes = told.size();
    made.referred = is_reference(told);
    if (made.referred) made.serial = decode<Reference>(told).value().part.serial;
    made.told_whole = view.written.contains("whole_info/" + std::to_string(rank));
    return made;
  }

  void run(const std::function<void(Rank&, const std::function<void()>& meet)>& body) {
    std::barrier all(static_cast<std::ptrdiff_t>(layout.size()));
    on_threads(static_cast<int>(layout.size()), [&](int r) {
      Rank self{r,
                std::move(Process::create().value()),
                std::string("host-") + layout[static_cast<size_t>(r)],
                {}};
      body(self, [&] { all.arrive_and_wait(); });
      all.arrive_and_wait();
      self.groups.clear();
    });
  }

  std::vector<int> everybody() const {
    std::vector<int> ranks;
    for (size_t r = 0; r < layout.size(); ++r) ranks.push_back(static_cast<int>(r));
    return ranks;
  }

  const std::string layout;
  const int few_ranks;
  MemoryStore store;
};

class FurtherGroup : public testing::TestWithParam<int> {};  // few_ranks
INSTANTIATE_TEST_SUITE_P(SmallAndLarge, FurtherGroup, testing::Values(32, 1));

TEST_P(FurtherGroup, OfRanksThatKnowOneAnotherExchangesReferences) {
  Job job("AABBA", GetParam());
  job.run([&](Job::Rank& self, auto&&) {
    auto first = job.make(self, "all", job.everybody(), true);
    EXPECT_FALSE(first.referred);
    std::set<uint32_t> serials;
    for (const std::vector<int>& members :
         {job.everybody(), {0, 1}, {3, 0, 4}, {4, 3, 2, 1, 0}, {2, 3}}) {
      auto further =
          job.make(self, "of " + std::to_string(members[0]) + std::to_string(members.size()),
                   members, false);
      if (further.sets == 0) continue;  // not one of them
      EXPECT_TRUE(further.referred);
      EXPECT_LT(further.bytes, first.bytes);
      EXPECT_LE(further.bytes, members[0] == self.rank ? 61u : 33u);
      // No key of the process is that of another of its groups; rank 0's is random.
      EXPECT_EQ(further.serial == 0, members[0] == self.rank);
      if (further.serial > 0) EXPECT_TRUE(serials.insert(further.serial).second);
      // Rank 0 of a large group publishes it for those that might not know the directory.
      EXPECT_EQ(further.told_whole, GetParam() == 1 && members[0] == self.rank);
    }
  });
}

TEST_P(FurtherGroup, AfterAGroupThatIsNotOfTheWholeJobTellsAllAgain) {
  Job job("AAB", GetParam());
  job.run([&](Job::Rank& self, auto&&) {
    job.make(self, "first", job.everybody(), false);
    EXPECT_FALSE(job.make(self, "second", job.everybody(), false).referred);
  });
}

// A process that was started in the place of another one: it has a new engine, and knows no other rank.
TEST_P(FurtherGroup, WithANewProcessIsMadeAndKnownFromThenOn) {
  for (int renewed : {0, 1, 3}) {
    Job job("AABB", GetParam());
    job.run([&](Job::Rank& self, auto&& meet) {
      job.make(self, "first", job.everybody(), true);
      meet();
      if (self.rank == renewed) {
        self.groups.clear();
        self.process = std::move(Process::create().value());
      }
      auto again = job.make(self, "again", job.everybody(), true);
      EXPECT_EQ(again.referred, self.rank != renewed);
      EXPECT_EQ(again.told_whole, self.rank != renewed);
      auto further = job.make(self, "further", job.everybody(), false);
      EXPECT_TRUE(further.referred);
    });
  }
}

TEST_P(FurtherGroup, WithARankThatHasMovedToAnotherHostIsMade) {
  Job job("AAAB", GetParam());
  job.run([&](Job::Rank& self, auto&&) {
    job.make(self, "first", job.everybody(), true);
    if (self.rank == 2) self.host = "host-B";
    EXPECT_EQ(job.make(self, "second", job.everybody(), false).referred, self.rank != 2);
    EXPECT_EQ(self.groups.back()->topology().node(1), (std::vector<int>{2, 3}));
  });
}

// Ranks of two jobs, or of two lives of one.
TEST_P(FurtherGroup, OfRanksThatKnowDifferentDirectoriesIsMade) {
  Job job("ABAB", GetParam());
  job.run([&](Job::Rank& self, auto&& meet) {
    const bool low = self.rank < 2;
    job.make(self, low ? "low" : "high", low ? std::vector{0, 1} : std::vector{2, 3}, true);
    meet();
    auto both = job.make(self, "both", job.everybody(), false);
    EXPECT_TRUE(both.referred && both.told_whole);
  });
}

// All groups over the endpoint have ended, so the next one gets a new endpoint.
TEST_P(FurtherGroup, OverANewEndpointTellsItsAddress) {
  Job job("AB", GetParam());
  job.run([&](Job::Rank& self, auto&& meet) {
    job.make(self, "first", job.everybody(), true);
    meet();
    self.groups.clear();
    meet();
    EXPECT_FALSE(job.make(self, "second", job.everybody(), true).referred);
    EXPECT_TRUE(job.make(self, "third", job.everybody(), false).referred);
  });
}

TEST_P(FurtherGroup, LeavesNoInformationInTheStore) {
  Job job("AAA", GetParam());
  job.run([&](Job::Rank& self, auto&& meet) {
    job.make(self, "first", job.everybody(), true);
    meet();
    if (self.rank == 1) self.process = (self.groups.clear(), std::move(Process::create().value()));
    job.make(self, "second", job.everybody(), false);
  });
  for (const char* key :
       {"second/rank_info/0", "second/whole_info/0", "second/whole_wanted", "second/whole_info/2"})
    EXPECT_FALSE(job.store.has(key)) << key;
}

}  // namespace
}  // namespace smddp
