// The network model that a group between hosts measures: who measures, what follows from the times, and that
// all ranks use the same numbers.
#include "network/measurement.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

#include "common/clock.h"
#include "common/env.h"
#include "flows/observed_rates.h"
#include "network/agreement.h"
#include "world.h"

namespace smddp {
namespace {

using std::chrono_literals::operator""ms;

const std::string kUsual = text_of(NetworkModel{});

Topology hosts(int nodes, int ranks_per_node) {
  std::vector<std::string> names;
  for (int i = 0; i < nodes * ranks_per_node; ++i)
    names.push_back("h" + std::to_string(i / ranks_per_node));
  return Topology(names);
}

TEST(MeasuringPair, AFewPairsHoweverManyHostsThereAre) {
  for (int nodes : {2, 3, 5, 16, 17, 33, 1000}) {
    Topology topology = hosts(nodes, 2);
    std::set<std::pair<Rank, Rank>> pairs;
    int measuring = 0;
    for (Rank r = 0; r < topology.ranks(); ++r) {
      auto pair = measuring_pair(topology, r);
      if (!pair) continue;
      EXPECT_TRUE(pair->first == r || pair->second == r);
      EXPECT_NE(topology.node_of(pair->first), topology.node_of(pair->second));
      pairs.insert(*pair);
      ++measuring;
    }
    EXPECT_EQ(pairs.size(), static_cast<size_t>(std::min(nodes / 2, kMeasuringPairs))) << nodes;
    EXPECT_EQ(measuring, 2 * static_cast<int>(pairs.size())) << nodes;
  }
}

TEST(MeasuringPair, NobodyInsideAHost) { EXPECT_FALSE(measuring_pair(hosts(1, 4), 0)); }

TEST(ObservedRates, ContradictAModel) {
  using Verdict = ObservedRates::Verdict;
  constexpr uint64_t kMiB = 1 << 20;
  auto after = [](int flows, double rate, double model, double ranks) {
    ObservedRates rates;
    for (int i = 0; i < flows; ++i) rates.count(4 * kMiB, static_cast<uint64_t>(4 * kMiB / rate));
    return rates.judge(model, ranks);
  };
  EXPECT_EQ(after(1, 0.12, 0.05, 1), Verdict::kTooLow);
  EXPECT_EQ(after(16, 0.12, 0.08, 1), Verdict::kNone);
  EXPECT_EQ(after(15, 0.012, 0.12, 1), Verdict::kNone);  // too few to tell
  EXPECT_EQ(after(16, 0.012, 0.12, 1), Verdict::kTooHigh);
  EXPECT_EQ(after(16, 0.012, 0.12, 8), Verdict::kNone);  // eight ranks share the host's network
  EXPECT_EQ(after(16, 0.04, 0.12, 1), Verdict::kNone);   // three operations share the rank's
  EXPECT_EQ(after(0, 1, 0.1, 1), Verdict::kNone);
  ObservedRates small, fast;
  for (int i = 0; i < 100; ++i) small.count(kMiB - 1, 2'000'000'000);
  for (int i = 0; i < 100; ++i) fast.count(2 * kMiB, 1'000'000);  // a burst
  EXPECT_EQ(small.judge(1, 1), Verdict::kNone);
  EXPECT_EQ(fast.judge(0.1, 1), Verdict::kNone);
}

// One fast flow among slow ones shows what the network can do; older flows are forgotten.
TEST(ObservedRates, TheFastestOfTheLastFlowsCounts) {
  ObservedRates rates;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 16; ++i)
      rates.count(4 << 20, i == 7 && round == 0 ? 40'000'000 : 400'000'000);
    EXPECT_EQ(rates.judge(0.12, 1),
              round == 0 ? ObservedRates::Verdict::kNone : ObservedRates::Verdict::kTooHigh);
  }
}

TEST(NetworkMeasurement, TheModelFollowsFromTheTimes) {
  NetworkModel model = model_of({30e3, 24e3, 4, 1e6, 1e6 + 30e3});
  EXPECT_NEAR(model.overhead_ns, 6e3, 1);
  EXPECT_NEAR(model.latency_ns, 18e3, 1);
  EXPECT_NEAR(model.bytes_per_ns, 1.0, 1e-6);
  // Other processes had the cores during the many exchanges.
  model = model_of({30e3, 200e3, 4, 1e6, 1e6 + 30e3});
  EXPECT_NEAR(model.overhead_ns, 15e3, 1);
  EXPECT_NEAR(model.latency_ns, 1e3, 1);
  // The exchanges in flight wait for the latency: what a message costs can't be seen.
  EXPECT_NEAR(model_of({800e3, 100e3, 4, 1e6, 1e7}).overhead_ns, 4e3, 1);
}

TEST(NetworkMeasurement, DisturbedTimesGiveNoAbsurdModel) {
  for (Timings timings : {Timings{}, Timings{1e12, 1e12, 1, 1, 1e12}, Timings{1, 1, 4, 1e12, 1},
                          Timings{1e12, 0, 0, 1e6, 1}}) {
    NetworkModel model = model_of(timings);
    EXPECT_GE(model.latency_ns, 1e3);
    EXPECT_LE(model.latency_ns, 10e6);
    EXPECT_GE(model.overhead_ns, 100);
    EXPECT_LE(model.overhead_ns, 50e3);
    EXPECT_GE(model.bytes_per_ns, 1e-3);
    EXPECT_LE(model.bytes_per_ns, 1e3);
  }
}

TEST(NetworkMeasurement, RanksAgreeOnMediansOfTwoDigits) {
  EXPECT_EQ(agree_on_measurements({"", "21.44,3.06,0.11749", "9999,50,0.001", "19,2,0.118"}),
            "21,3.1,0.12");
  EXPECT_EQ(agree_on_measurements({"", "nonsense"}), "");
}

// One exchange of a byte takes longer, and the first timed one of the smallest transfers.
class DisturbedPair final : public PairExchange {
 public:
  explicit DisturbedPair(std::chrono::milliseconds longer) : longer_(longer) {}
  int rank() const override { return 0; }
  Status exchange(const std::shared_ptr<std::vector<std::byte>>&, size_t bytes, bool,
                  uint64_t) override {
    int call = ++calls_[bytes];
    if ((bytes == 1 && call == 10) || (bytes == 64 << 10 && call == 2))
      std::this_thread::sleep_for(longer_);
    return {};
  }
  uint64_t count_messages() override { return 0; }

 private:
  const std::chrono::milliseconds longer_;
  std::map<size_t, int> calls_;
};

TEST(NetworkMeasurement, OneDisturbanceChangesNothing) {
  for (auto longer : {30ms, 70ms}) {
    Result<Timings> timings = Status(Code::kTimeout, "");
    for (int i = 0; i < 20 && !timings; ++i) {  // on a busy machine a measurement may be in vain
      DisturbedPair pair(longer);
      timings = measure(pair);
    }
    ASSERT_TRUE(timings.ok());
    EXPECT_LT(timings.value().one_ns, 25e6);
    EXPECT_EQ(timings.value().bytes, 8 << 20) << longer.count();
  }
}

// What each rank uses, by rank, and which keys were written.
struct Made {
  std::vector<std::string> networks, sources;
  std::vector<std::string> errors;
  std::set<std::string> keys;
  std::set<std::string> left;  // of the pairs, in the end
  bool measured() const { return keys.lower_bound("network/") != keys.lower_bound("network0"); }
};

// Stops its rank's engine for some time when the rank has said that it has joined its pair.
class StoppingStore final : public CountingStore {
 public:
  StoppingStore(Store& store, Engine& engine, std::chrono::milliseconds stop)
      : CountingStore(store, ""), engine_(engine), stop_(stop) {}
  ~StoppingStore() override {
    if (stopped_.joinable()) stopped_.join();
  }
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    Status done = CountingStore::set(key, value);
    if (stop_.count() > 0 && key.starts_with("network/0/joined/")) {
      stopped_ = std::thread([this] {
        auto lock = engine_.lock();
        std::this_thread::sleep_for(stop_);
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return done;
  }

 private:
  Engine& engine_;
  const std::chrono::milliseconds stop_;
  std::thread stopped_;
};

class MeasuredGroup : public testing::Test {
 protected:
  MeasuredGroup() {
    set("auto");
    ::setenv("XDG_CACHE_HOME", cache_.c_str(), 1);
  }
  ~MeasuredGroup() override {
    set(before_.c_str());
    std::filesystem::remove_all(cache_);
  }
  static void set(const char* curve) {
    ::setenv("SMDDP_DEBUG", (std::string("curve=") + curve).c_str(), 1);
  }

  // A group with one rank per letter, which is its host; the engines stay for the next group.
  Made make(const std::string& layout, const Group::Options& of_first = {}) {
    MemoryStore store;
    Made made;
    std::mutex mutex;
    processes_.resize(std::max(processes_.size(), layout.size()));
    made.networks.resize(layout.size());
    made.sources.resize(layout.size());
    on_threads(static_cast<int>(layout.size()), [&](int rank) {
      auto r = static_cast<size_t>(rank);
      if (!processes_[r]) processes_[r] = std::move(Process::create().value());
      StoppingStore view(store, processes_[r]->engine(), r + 1 == layout.size() ? stop_last_ : 0ms);
      Group::Options options = r == 0 ? of_first : Group::Options();
      options.name = "g";
      options.host = layout.substr(r, 1);
      options.few_ranks = few_ranks_;
      auto group = Group::create(*processes_[r], view, static_cast<int>(r),
                                 static_cast<int>(layout.size()), options);
      std::lock_guard lock(mutex);
      for (const auto& [key, value] : view.written) made.keys.insert(key);
      if (!group) {
        made.errors.push_back(group.status().message());
        return;
      }
      made.networks[r] = group.value()->state().network;
      Engine::Lock engine = processes_[r]->engine().lock();
      made.sources[r] = processes_[r]->network().known().source;
      groups_.push_back(std::move(group.value()));
    });
    groups_.clear();
    for (const std::string& key : made.keys)
      if (key.starts_with("network/") && store.has(key)) made.left.insert(key);
    return made;
  }
  // In new processes. On a busy machine a measurement may be in vain.
  Made next(const std::string& layout) {
    Made made;
    for (int i = 0; i == 0 || (i < 20 && made.sources[0].starts_with("assumed")); ++i) {
      processes_.clear();
      made = make(layout);
    }
    return made;
  }

  int few_ranks_ = 32;
  std::chrono::milliseconds stop_last_{0};
  const std::string before_ = env::debug("curve");
  const std::string cache_ = testing::TempDir() + "network-cache-" + std::to_string(getpid());
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<std::unique_ptr<Group>> groups_;
};

// Fails where a rank tells what it has measured.
class FullStore final : public CountingStore {
 public:
  explicit FullStore(Store& store) : CountingStore(store, "") {}
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (key.starts_with("measured/")) return {Code::kUnavailable, "the store is full"};
    return CountingStore::set(key, value);
  }
};

TEST_F(MeasuredGroup, ThePairThatMeasuresIsNoDirectoryOfTheJob) {
  MemoryStore memory;
  on_threads(2, [&](int rank) {
    auto process = std::move(Process::create().value());
    FullStore store(memory);
    Group::Options options{.name = "g", .host = rank == 0 ? "A" : "B"};
    options.whole_job = true;
    auto group = Group::create(*process, store, rank, 2, options);
    EXPECT_TRUE(says(group.status(), "the store is full"));
    EXPECT_EQ(process->place().directory, nullptr);
  });
}

void expect_alike(const Made& made) {
  EXPECT_TRUE(made.errors.empty()) << made.errors[0];
  for (const std::string& network : made.networks) EXPECT_EQ(network, made.networks[0]);
  for (const std::string& source : made.sources) EXPECT_EQ(source, made.sources[0]);
  EXPECT_TRUE(parse_network_model(made.networks[0]).ok()) << made.networks[0];
}

TEST_F(MeasuredGroup, AGroupWithARankThatKnowsNothingMeasuresAgain) {
  expect_alike(make("AB"));
  Made larger = make("ABC");
  expect_alike(larger);
  EXPECT_TRUE(larger.measured());
}

TEST_F(MeasuredGroup, NothingIsMeasuredInsideAHostOrIfTheModelIsGiven) {
  Made inside = make("AA");
  EXPECT_FALSE(inside.measured());
  EXPECT_EQ(inside.networks[0], "");
  for (auto [given, used] : {std::pair("50:2.5:3", "50,2.5,3"), {"default", "20,4,1.25"}}) {
    set(given);
    Made made = make("AB");
    expect_alike(made);
    EXPECT_FALSE(made.measured());
    EXPECT_EQ(made.networks[0], used);
  }
}

TEST_F(MeasuredGroup, AnotherGivenModelIsAnErrorThatAllRanksTell) {
  Group::Options options;
  options.network = NetworkModel{1e3, 1e3, 1};
  for (const char* others : {"auto", "20:4:1.25"}) {
    set(others);
    Made made = make("ABB", options);
    ASSERT_EQ(made.errors.size(), 3u);
    for (const std::string& error : made.errors)
      EXPECT_TRUE(says(error, "another curve in SMDDP_DEBUG"));
  }
}

TEST_F(MeasuredGroup, ARankThatIsStoppedMeanwhileGivesNoAbsurdNumbers) {
  stop_last_ = 1000ms;
  uint64_t began = now_ns();
  Made made = make("AAB");
  EXPECT_LT(now_ns() - began, 6'000'000'000ull);
  EXPECT_EQ(made.left, std::set<std::string>());
  expect_alike(made);
  EXPECT_EQ(made.networks[0], kUsual);
}

// What the processes of a job keep ends with them.
class NextJob : public MeasuredGroup {
 protected:
  std::vector<std::filesystem::path> files() {
    std::vector<std::filesystem::path> found;
    std::error_code none;
    for (const auto& entry :
         std::filesystem::directory_iterator(cache_ + "/deepspeed_smddp/tune", none))
      found.push_back(entry.path());
    return found;
  }
  void write(const std::string& text) {
    ASSERT_EQ(files().size(), 1u);
    std::ofstream(files()[0]) << text;
  }
  std::string read() {
    std::ifstream file(files().at(0));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The only file, with another time of the measurement.
  void date(int64_t seconds) {
    std::string text = read();
    size_t at = text.find('@');
    write(text.substr(0, at + 1) + std::to_string(seconds) + text.substr(text.find('\n')));
  }
};

TEST_F(NextJob, AndLaterGroupsTakeOverWhatWasMeasured) {
  for (int few : {32, 2}) {
    few_ranks_ = few;
    std::filesystem::remove_all(cache_);
    Made first = next("AABB");
    expect_alike(first);
    EXPECT_TRUE(first.measured());
    EXPECT_EQ(first.sources[0], "measured now");
    EXPECT_NE(first.networks[0], kUsual);
    EXPECT_EQ(files().size(), 1u);  // the hosts share it here
    make("AA");                     // which knows nothing of a network
    Made later = make("AABB");      // of the same job
    expect_alike(later);
    EXPECT_FALSE(later.measured());
    EXPECT_EQ(later.networks, first.networks);
    EXPECT_EQ(later.sources, first.sources);
    Made second = next("AABB");
    expect_alike(second);
    EXPECT_FALSE(second.measured());
    EXPECT_EQ(second.networks, first.networks);
    EXPECT_EQ(second.sources[0].rfind("measured on 20", 0), 0u) << second.sources[0];
    Made further = make("AABB");  // of the same job
    EXPECT_EQ(further.networks, first.networks);
    EXPECT_EQ(further.sources, second.sources);
    EXPECT_FALSE(further.measured());
  }
}

TEST_F(NextJob, OnOtherHostsMeasures) {
  next("AABB");
  for (const char* layout : {"AAABBB", "AABBC", "AABC", "ACCA"})
    EXPECT_TRUE(next(layout).measured());
  EXPECT_FALSE(next("BBAA").measured());
}

TEST_F(NextJob, MeasuresIfItIsAskedTo) {
  next("AB");
  date(std::time(nullptr) - 3600);
  set("measure");
  Made anew = next("AB");
  expect_alike(anew);
  EXPECT_TRUE(anew.measured());
  EXPECT_FALSE(make("AB").measured());
  set("auto");
  Made later = next("AB");
  EXPECT_FALSE(later.measured());
  EXPECT_EQ(later.networks, anew.networks);
}

TEST_F(NextJob, MeasuresWhatIsOld) {
  next("AB");
  const int64_t now = std::time(nullptr);
  for (auto [seconds, measures] : {std::pair(now - kLongestNetworkAge + 60, false),
                                   {now - kLongestNetworkAge - 60, true},
                                   {now + 60, false},
                                   {now + 100'000, true}}) {
    date(seconds);
    EXPECT_EQ(next("AB").measured(), measures) << seconds - now;
  }
}

TEST_F(NextJob, DeletesFilesThatAreOld) {
  next("AB");
  const auto now = std::filesystem::file_time_type::clock::now();
  std::filesystem::last_write_time(files().at(0),
                                   now - std::chrono::seconds(kLongestNetworkAge + 60));
  next("AC");
  EXPECT_EQ(files().size(), 1u);
}

TEST_F(NextJob, ReplacesAFileThatIsNone) {
  next("AB");
  const std::string good = read();
  std::string foreign = good;
  foreign[good.find("topology ") + 9] ^= 1;
  for (const std::string& text :
       {std::string(), std::string("\0\xff\n", 3), std::string(100'000, 'x'), foreign,
        good.substr(0, good.find("topology")), "measured network nan,4,1@1" + good.substr(20),
        "measured network 20,4,inf@1764150000" + good.substr(good.find('\n')),
        "measured network 20,4,1e9@1764150000" + good.substr(good.find('\n'))}) {
    write(text);
    testing::internal::CaptureStderr();
    Made made = next("AB");
    const std::string said = testing::internal::GetCapturedStderr();
    expect_alike(made);
    EXPECT_TRUE(made.measured()) << text.substr(0, 99);
    EXPECT_TRUE(says(said, "holds no measured network of these hosts"));
    EXPECT_FALSE(next("AB").measured());
  }
}

TEST_F(NextJob, NeedsNoDirectory) {
  std::ofstream(cache_) << "a file in its place";
  for (int i = 0; i < 2; ++i) {
    Made made = next("AB");
    expect_alike(made);
    EXPECT_TRUE(made.measured());
  }
}

TEST(RecalledNetwork, CountsIfAllHostsThatMeasureHaveTheSame) {
  Topology three = hosts(3, 2);  // the last one does not measure
  const std::string early = "21,3.1,0.12@1764150000", late = "21,3.1,0.12@1764160000";
  EXPECT_EQ(agree_on_recalled({late, early, ""}, three), early);
  EXPECT_EQ(agree_on_recalled({early, late, "22,4,1@5"}, three), early);
  for (const char* other : {"", "21,3.1,0.13@1764150000", "21,3.1,0.12", "nonsense@3"})
    EXPECT_EQ(agree_on_recalled({early, other, early}, three), "") << other;
}

// A rank that never comes to its pair.
TEST_F(MeasuredGroup, ARankThatDoesNotMeasureDelaysTheGroupByItsOwnTimeoutOnly) {
  auto process = Process::create();
  auto other = Process::create();
  ASSERT_TRUE(process.ok() && other.ok());
  MemoryStore store;
  RankInfo info;
  info.host = info.host_name = "B";
  info.fabric = {
      FabricAddress::State::kOpen, other.value()->fabric().value()->facts().address, "", {}};
  ASSERT_TRUE(store.set("rank_info/1", encode(info)).ok());
  ASSERT_TRUE(store.set("joined/1", {1}).ok());
  ASSERT_TRUE(store.set("measured/1", {1}).ok());
  uint64_t began = now_ns();
  auto group = Group::create(*process.value(), store, 0, 2, {.name = "g", .host = "A"});
  ASSERT_TRUE(group.ok()) << group.status().message();
  EXPECT_LT(now_ns() - began, 10'000'000'000ull);
  EXPECT_EQ(group.value()->state().network, kUsual);
}

}  // namespace
}  // namespace smddp
