// A rank that can't make a group, for want of descriptors, memory or a store: all ranks get an error that
// names it, at once and not when the store's timeout is over. The ranks are processes, each with limits of its
// own, or threads.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>

#include "common/clock.h"
#include "world.h"

namespace smddp {
namespace {

// Seconds. No wait in these paths but that for the store, whose limit is kTimeoutNs, lasts so long; but to open
// libfabric takes seconds where other processes use all cores.
constexpr double kAtOnce = 12;
constexpr uint64_t kTimeoutNs = 30'000'000'000;
constexpr size_t kMostRanks = 4;

// Whether this process takes no connection at its port for questions: as one of which that thread got no core yet.
std::atomic<bool> is_deaf = false;

// A store in memory that forked processes share: it needs no descriptor, as a store's open connection.
class SharedStore : public Store {
 public:
  SharedStore() {
    void* at = mmap(nullptr, sizeof(Entry) * kEntries, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    entries_ = static_cast<Entry*>(at);
  }
  ~SharedStore() override { munmap(entries_, sizeof(Entry) * kEntries); }
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    Entry* known = find(key);
    if (known != nullptr && known->bytes == value.size()) {  // a count
      std::memcpy(known->value, value.data(), value.size());
      return {};
    }
    for (size_t i = 0; i < kEntries; ++i) {
      int free = 0;
      Entry& entry = entries_[i];
      if (!entry.state.compare_exchange_strong(free, 1)) continue;
      std::strncpy(entry.key, key.c_str(), sizeof entry.key - 1);
      entry.bytes = value.size();
      std::memcpy(entry.value, value.data(), value.size());
      entry.state = 2;
      return {};
    }
    return {Code::kInternal, "the test's store is full"};
  }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    std::vector<std::vector<uint8_t>> values;
    uint64_t until = now_ns() + kTimeoutNs;
    for (const std::string& key : keys) {
      Entry* entry = nullptr;
      while ((entry = find(key)) == nullptr) {
        if (has(stop)) return Status(Code::kAborted, stop);
        if (now_ns() > until) return Status(Code::kTimeout, "a key is missing");
        usleep(1000);
      }
      values.emplace_back(entry->value, entry->value + entry->bytes);
    }
    return values;
  }
  bool has(const std::string& key) override { return find(key) != nullptr; }
  // No entry is used again: a process that still looks at it sees it whole.
  void remove(const std::string& key) override {
    if (Entry* entry = find(key)) entry->state = 3;
  }

 private:
  static constexpr size_t kEntries = 48;
  struct Entry {
    std::atomic<int> state;  // 0: free, 1: being written, 2: set, 3: removed
    char key[64];
    size_t bytes;
    uint8_t value[8192];
  };
  Entry* find(const std::string& key) const {
    for (size_t i = 0; i < kEntries; ++i) {
      if (entries_[i].state == 2 && key == entries_[i].key) return &entries_[i];
    }
    return nullptr;
  }
  Entry* entries_;
};

// A layout with "*" is that of a group that is made as a large one is; with "+", as one that is known to span hosts;
// with "^", as a further group of ranks that know one another's processes; with "~", of ranks of which all but the
// last do.
std::string hosts_of(const std::string& layout) {
  return layout.substr(0, layout.find_first_of("*+^~"));
}

struct Report {
  bool ended, made;
  double seconds;
  char text[2000];
};

Group::Options options_of(const std::string& layout, int rank) {
  Group::Options options;
  options.name = "test";
  options.timeout_ns = kTimeoutNs;
  options.host = std::string("host-") + layout[static_cast<size_t>(rank)];
  if (layout.find('*') != std::string::npos) options.few_ranks = 1;
  options.several_hosts = layout.find('+') != std::string::npos;
  return options;
}

// Of this process, until lift_limits().
void limit(decltype(RLIMIT_AS) which, size_t most) {
  rlimit both;
  getrlimit(which, &both);
  both.rlim_cur = most;
  setrlimit(which, &both);
}

// The tests limit the making of a group, not its use.
void lift_limits() {
  for (auto which : {RLIMIT_NOFILE, RLIMIT_AS}) {
    rlimit both;
    getrlimit(which, &both);
    both.rlim_cur = both.rlim_max;
    setrlimit(which, &both);
  }
}

// What one rank does: makes a group, and uses it.
Status be_rank(
    const std::string& layout, int rank, Store& store, const std::function<void()>& before_group,
    const std::function<void()>& after_group = [] {}) {
  auto process = Process::create();
  if (!process) return process.status();
  auto ranks = static_cast<int>(hosts_of(layout).size());
  std::unique_ptr<Group> first;
  const bool renewed = layout.find('~') != std::string::npos && rank + 1 == ranks;
  if (layout.find_first_of("^~") != std::string::npos) {
    PrefixStore part(store, "first/");
    Group::Options options = options_of(layout, rank);
    options.whole_job = !renewed;
    auto made = Group::create(*process.value(), part, rank, ranks, options);
    if (!made) return made.status();
    first = std::move(made.value());
  }
  before_group();
  auto group = Group::create(*process.value(), store, rank, ranks, options_of(layout, rank));
  if (!group) return group.status();
  lift_limits();
  after_group();
  std::vector<int> in(10, rank), out(in.size() * static_cast<size_t>(ranks));
  auto op = gather_of(in, out, ranks);
  group.value()->submit(op, {}, false);
  process.value()->engine().wait(*op);
  return op->status();
}

// Until all ranks have lifted their limits: a rank that uses its group before connects to one that may have no
// descriptor left for the connection.
void await_all(Store& store, int rank, size_t ranks) {
  std::vector<std::string> lifted;
  for (size_t r = 0; r < ranks; ++r) lifted.push_back("lifted/" + std::to_string(r));
  (void)store.set(lifted[static_cast<size_t>(rank)], {1});
  (void)store.get(lifted, "never");
}

// A process per rank; before(rank) runs in each before its group is made.
class ForkedRanks {
 public:
  ForkedRanks(const std::string& layout, Store& store, const std::function<void(int)>& before) {
    const size_t ranks = hosts_of(layout).size();
    for (size_t r = 0; r < ranks; ++r) {
      pid_t child = fork();
      if (child == 0) {
        alarm(60);
        uint64_t begun = now_ns();
        auto rank = static_cast<int>(r);
        Status status = be_rank(
            layout, rank, store, [&] { before(rank); }, [&] { await_all(store, rank, ranks); });
        Report& report = reports_[r];
        report.seconds = static_cast<double>(now_ns() - begun) * 1e-9;
        std::strncpy(report.text, status.message().c_str(), sizeof report.text - 1);
        report.made = status.ok();
        report.ended = true;
        _exit(0);
      }
      children_.push_back(child);
    }
  }
  ~ForkedRanks() { munmap(reports_, sizeof(Report) * kMostRanks); }
  std::vector<Report> reports() const {
    for (pid_t child : children_) waitpid(child, nullptr, 0);
    return {reports_, reports_ + children_.size()};
  }

 private:
  Report* const reports_ =
      static_cast<Report*>(mmap(nullptr, sizeof(Report) * kMostRanks, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children_;
};

// All ranks have a group that works; or none, and all say that it is because of `victim`, at once.
bool expect_one_mind(const std::vector<Report>& reports, size_t victim, const std::string& what) {
  std::string name = "rank " + std::to_string(victim) + " (host-";
  for (size_t r = 0; r < reports.size(); ++r) {
    const Report& report = reports[r];
    EXPECT_TRUE(report.ended) << what << ": rank " << r << " crashed or hung";
    EXPECT_EQ(report.made, reports[0].made) << what << ": rank " << r << ": " << report.text;
    EXPECT_LT(report.seconds, kAtOnce) << what << ": rank " << r << ": " << report.text;
    if (report.made) continue;
    EXPECT_TRUE(says(report.text, name)) << what << ": rank " << r;
  }
  return reports[0].made;
}

// A limit below which as many descriptors are free.
size_t limit_with(int free) {
  int at = 0;
  for (; free > 0 || fcntl(at, F_GETFD) >= 0; ++at) free -= fcntl(at, F_GETFD) < 0 ? 1 : 0;
  return static_cast<size_t>(at);
}

size_t address_space() {
  std::ifstream file("/proc/self/statm");
  size_t pages = 0;
  file >> pages;
  return pages * 4096;
}

class StartFailure : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Layouts, StartFailure,
                         testing::Values("AAA", "AAB", "ABB", "AB", "AAB*", "ABB*"));

// Rank 1 has `extra` of what is limited, more each time until it suffices: each step of the making of a group fails
// once.
void expect_each_failure_is_told(const char* layout, const char* unit, size_t most,
                                 const std::function<void(size_t extra)>& limit_to,
                                 const std::function<size_t(size_t)>& next) {
  bool made = false;
  int failures = 0;
  for (size_t extra = 0; extra < most && !made && !testing::Test::HasFailure();
       extra = next(extra)) {
    SharedStore store;
    auto before = [&](int rank) {
      if (rank == 1) limit_to(extra);
    };
    auto reports = ForkedRanks(layout, store, before).reports();
    made = expect_one_mind(reports, 1, std::to_string(extra) + unit);
    failures += made ? 0 : 1;
  }
  EXPECT_TRUE(made);
  EXPECT_GT(failures, 0);
}

TEST_P(StartFailure, DescriptorsThatRunOutOnOneRankAreToldToAll) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer takes descriptors";
  expect_each_failure_is_told(
      GetParam(), " descriptors", 60,
      [](size_t extra) { limit(RLIMIT_NOFILE, limit_with(static_cast<int>(extra))); },
      [](size_t extra) { return extra + 1; });
}

TEST_P(StartFailure, MemoryThatRunsOutOnOneRankIsToldToAll) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer takes address space";
  expect_each_failure_is_told(
      GetParam(), " MiB", 512,
      [](size_t extra) { limit(RLIMIT_AS, address_space() + (extra << 20)); },
      [](size_t extra) { return extra < 4 ? extra + 1 : 2 * extra; });
}

// Ends the process of a rank where it would set a key, or right after that.
class EndingStore : public PrefixStore {
 public:
  explicit EndingStore(Store& store) : PrefixStore(store, "") {}
  void end_at(const std::string& key, bool sets) {
    last_ = key;
    sets_ = sets;
  }
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    const bool ends = !last_.empty() && key.starts_with(last_);
    if (ends && !sets_) raise(SIGKILL);
    Status set = PrefixStore::set(key, value);
    if (ends) usleep(50'000);
    if (ends) raise(SIGKILL);
    return set;
  }

 private:
  std::string last_;
  bool sets_ = false;
};

struct Victim {
  const char* layout;
  size_t rank;
  const char* key;         // which it does not set any more
  bool unreached = false;  // it does, and ends before any process has reached it
};

// The groups of all victims are made side by side: most of their time is a wait.
void expect_the_end_is_told_to_all(const std::vector<Victim>& victims) {
  struct Making {
    explicit Making(const Victim& victim)
        : store(shared), ranks(victim.layout, store, [&](int rank) {
            if (static_cast<size_t>(rank) != victim.rank) return;
            store.end_at(victim.key, victim.unreached);
            is_deaf = victim.unreached;
          }) {}
    SharedStore shared;
    EndingStore store;
    ForkedRanks ranks;
  };
  std::vector<std::unique_ptr<Making>> makings;
  for (const Victim& victim : victims) makings.push_back(std::make_unique<Making>(victim));
  for (size_t v = 0; v < victims.size(); ++v) {
    const Victim& victim = victims[v];
    auto reports = makings[v]->ranks.reports();
    for (size_t r = 0; r < reports.size(); ++r) {
      const std::string text = reports[r].text;
      const std::string at = std::string(victim.layout) + " " + victim.key + ": " + text;
      EXPECT_EQ(reports[r].ended, r != victim.rank) << at;
      if (r == victim.rank) continue;
      EXPECT_FALSE(reports[r].made) << at;
      EXPECT_LT(reports[r].seconds, kAtOnce) << at;
      EXPECT_TRUE(says(text, "rank " + std::to_string(victim.rank) + " (host-")) << at;
      EXPECT_TRUE(says(text, "ended")) << at;
    }
  }
}

// The other ranks of its host see that it has ended, and tell the ranks of other hosts.
TEST(StartFailures, ARankOfALargeGroupThatEndsBeforeItHandsOnIsNamedByAll) {
  expect_the_end_is_told_to_all({{"AAB*", 0, "rank_info/table/0"},
                                 {"AAB*", 0, "rank_info/handed/0"},
                                 {"AAB*", 0, "all_joined"},
                                 {"ABB*", 1, "rank_info/handed/1"}});
}

// No other rank of its host waits for it: ranks of other hosts see it by its heartbeat and its port.
TEST(StartFailures, ARankThatOtherHostsWaitForAndThatEndsIsNamedByAll) {
  expect_the_end_is_told_to_all({{"ABB*+", 0, "host/"},
                                 {"ABB*+", 0, "rank_info/table/0"},
                                 {"ABC*", 0, "all_joined"},
                                 {"AAB*", 2, "joined/2"},
                                 {"AB", 0, "joined/0"},
                                 {"AAB", 2, "joined/2"}});
}

// It has joined, but was never reached: that it refuses connections later would tell nothing.
TEST(StartFailures, ARankThatEndsBeforeItWasReachedIsNamedByAll) {
  std::vector<Victim> victims;
  for (auto [layout, key] : {std::pair("AB", "joined/1"),
                             {"AAB", "joined/2"},
                             {"ABC", "joined/0"},
                             {"ABC", "joined/1"},
                             {"ABC*", "joined/2"},
                             {"ABCD", "joined/3"}})
    victims.push_back({layout, static_cast<size_t>(key[7] - '0'), key, true});
  expect_the_end_is_told_to_all(victims);
}

// As behind a firewall.
TEST(StartFailures, ARankThatCanNotBeReachedAndLivesIsInTheGroup) {
  SharedStore store;
  auto reports = ForkedRanks("ABC", store, [](int rank) { is_deaf = rank == 1; }).reports();
  for (const Report& report : reports) {
    EXPECT_TRUE(report.made) << report.text;
    EXPECT_LT(report.seconds, 2 * kAtOnce);
  }
}

// Rank 0 ends while it gathers, before it asks for the whole of what ranks are, and before it hands that on.
TEST(StartFailures, ARankOfAFurtherGroupThatEndsIsNamedByAll) {
  expect_the_end_is_told_to_all({{"ABB*+^", 0, "host/"},
                                 {"AAB*^", 0, "rank_info/handed/0"},
                                 {"ABB*+~", 0, "whole_wanted"},
                                 {"ABB*+~", 0, "host/"},
                                 {"AAB^", 2, "joined/2"},
                                 {"AB~", 0, "joined/0"}});
}

// --- ranks as threads ----------------------------------------------------------------------------

// A store whose connections break after `requests` requests of all ranks: those that wait are told, too.
class DyingStore : public Store {
 public:
  DyingStore(Store& store, std::atomic<int>& requests) : store_(store), requests_(requests) {}
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    return dead() ? broken() : store_.set(key, value);
  }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    if (dead()) return broken();
    while (!all_set(keys)) {
      if (requests_ < 0) return broken();
      if (store_.has(stop)) return Status(Code::kAborted, stop);
      usleep(1000);
    }
    return store_.get(keys, stop);
  }
  bool has(const std::string& key) override { return requests_ >= 0 && store_.has(key); }
  void remove(const std::string& key) override {
    if (requests_ >= 0) store_.remove(key);
  }

 private:
  bool all_set(const std::vector<std::string>& keys) {
    return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return store_.has(key); });
  }
  bool dead() { return --requests_ < 0; }
  static Status broken() { return {Code::kUnavailable, "the rendezvous store failed: broken"}; }
  Store& store_;
  std::atomic<int>& requests_;
};

// Makes a group over one store per rank, each on a thread.
template <class S>
std::vector<Status> make_group(const std::string& layout, std::vector<S>& stores, double* seconds) {
  std::vector<Status> made(hosts_of(layout).size());
  uint64_t begun = now_ns();
  on_threads(static_cast<int>(made.size()), [&](int rank) {
    auto r = static_cast<size_t>(rank);
    made[r] = be_rank(layout, rank, stores[r], [] {});
  });
  *seconds = static_cast<double>(now_ns() - begun) * 1e-9;
  return made;
}

TEST_P(StartFailure, AStoreThatDiesAtAnyRequestIsAnErrorAtOnce) {
  std::string layout = GetParam();
  bool made = false;
  for (int requests = 0; requests < 60 && !made && !HasFailure(); ++requests) {
    MemoryStore memory;
    std::atomic<int> left{requests};
    std::vector<DyingStore> stores(hosts_of(layout).size(), DyingStore(memory, left));
    double seconds = 0;
    auto statuses = make_group(layout, stores, &seconds);
    EXPECT_LT(seconds, kAtOnce) << requests;
    made = left >= 0;
    for (const Status& status : statuses) {
      if (made) EXPECT_TRUE(status.ok()) << status.message();
      // The cause can't be told through the store: a rank may only see that another one is gone.
      bool of_store = status.message().find("the rendezvous store failed") != std::string::npos;
      bool of_rank = status.message().find("shared segment of a rank") != std::string::npos ||
                     status.message().find("notification pipe of a rank") != std::string::npos ||
                     status.message().find("that rank has ended") != std::string::npos ||
                     status.message().find("its process has ended") != std::string::npos;
      EXPECT_TRUE(status.ok() || of_store || of_rank) << requests << ": " << status.message();
    }
  }
  EXPECT_TRUE(made);
}

// docker0 has one address on all hosts. Ranks of one machine, as in all other tests, may well share one.
TEST(StartFailureOfAddresses, TwoMachinesThatGiveOneAddressAreRefused) {
  auto host = [](char machine, int pid_namespace) {
    return std::string("host/") + std::string(36, machine) + "/" + std::to_string(pid_namespace);
  };
  for (char other : {'a', 'b'}) {
    MemoryStore store;
    on_threads(2, [&](int rank) {
      auto process = Process::create();
      ASSERT_TRUE(process.ok());
      Group::Options options = options_of("AB", rank);
      options.host = host(rank == 0 ? 'a' : other, rank);
      auto group = Group::create(*process.value(), store, rank, 2, options);
      EXPECT_EQ(group.ok(), other == 'a') << group.status().message();
      if (!group.ok()) EXPECT_TRUE(says(group.status(), "SMDDP_FABRIC_INTERFACE"));
    });
  }
}

// Throws where a rank reads what the others have published.
class ThrowingStore : public CountingStore {
 public:
  ThrowingStore(Store& store, int at) : CountingStore(store, ""), at_(at) {}
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    if (at_-- != 0) return CountingStore::get(keys, stop);
    thrown_ = true;
    throw std::bad_alloc();
  }
  bool thrown() const { return thrown_; }

 private:
  int at_;
  bool thrown_ = false;
};

TEST_P(StartFailure, AnExceptionOnOneRankIsToldToAll) {
  std::string layout = GetParam();
  for (int at = 0; at < 3; ++at) {
    MemoryStore memory;
    std::vector<ThrowingStore> stores;
    for (size_t r = 0; r < hosts_of(layout).size(); ++r)
      stores.emplace_back(memory, r == 1 ? at : -1);
    double seconds = 0;
    auto statuses = make_group(layout, stores, &seconds);
    EXPECT_LT(seconds, kAtOnce);
    for (const Status& status : statuses) {
      EXPECT_EQ(status.ok(), !stores[1].thrown()) << at << ": " << status.message();
      if (status.ok()) continue;
      EXPECT_TRUE(says(status, "rank 1 (host-"));
      EXPECT_TRUE(says(status, "out of memory"));
    }
  }
}

}  // namespace
}  // namespace smddp

// In the place of the C library's.
extern "C" int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  if (!smddp::is_deaf) return static_cast<int>(syscall(SYS_accept4, fd, address, size, flags));
  usleep(10'000);
  errno = EAGAIN;
  return -1;
}
