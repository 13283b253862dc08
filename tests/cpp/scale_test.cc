// Hundreds of ranks: how a group of them starts, what a rank holds, and that every collective is right.
// The tests named FullScale and LongerScale take 256 ranks. Times are printed, never judged.
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <barrier>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "common/clock.h"
#include "file_store.h"
#include "world.h"

namespace smddp::scale {
namespace {

constexpr double kMiB = 1 << 20;
constexpr double kRankBytes = 16 * kMiB;

struct Layout {
  int hosts;
  int ranks_per_host;
  int ranks() const { return hosts * ranks_per_host; }
  // Ranks of one host are consecutive, as launchers place them.
  std::string host_of(int rank) const { return "host-" + std::to_string(rank / ranks_per_host); }
  // Whether the ranks exchange their information by way of the first rank of each host.
  bool large() const { return ranks() > Group::Options().few_ranks; }
  // Requests of the store that make a group of few ranks: the exchange of the ranks' information; between hosts,
  // the first rank of each host then says that it has joined, and all wait for that.
  int sets(int rank) const { return hosts > 1 && rank % ranks_per_host == 0 ? 2 : 1; }
  int gets() const { return hosts > 1 ? 2 : 1; }
  // The most values of others that a rank of a large group reads: rank 0 one per rank and one per host; the others
  // what rank 0 is, what their host's first rank is, the table of ranks or its place, and that all have joined.
  int values(int rank) const { return rank == 0 ? ranks() - 1 + hosts - 1 : 4; }
  // Ranks of other hosts whose addresses a rank knows: all, or in a large group those of its rail.
  int peers() const {
    return ranks() <= pattern::kPairedRanks ? ranks() - ranks_per_host : hosts - 1;
  }
  std::string text() const {
    return std::to_string(hosts) + " hosts x " + std::to_string(ranks_per_host);
  }
  // An upper bound of what one rank may hold: the engine's own and the endpoint's; a pipe to wake it and a
  // death handle per neighbour; a connection per rail peer, two for a moment where both began one; on a
  // slow machine, where ranks are late, a question of liveness to and from each of these as well.
  int descriptors() const { return 3 + 20 + 2 * (ranks_per_host - 1) + 4 * (hosts - 1); }
};

struct Footprint {
  double pss = 0, rss = 0;  // bytes; pss counts a page that several mappings show once
  int descriptors = 0;
};

Footprint footprint() {
  malloc_trim(0);
  Footprint held;
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string word; rollup >> word;) {
    if (word == "Pss:") rollup >> held.pss;
    if (word == "Rss:") rollup >> held.rss;
  }
  held.pss *= 1024;
  held.rss *= 1024;
  for (auto it = std::filesystem::directory_iterator("/proc/self/fd");
       it != std::filesystem::directory_iterator(); ++it) {
    ++held.descriptors;
  }
  return held;
}

int64_t value(int rank, size_t i) {
  return static_cast<int64_t>((i * 31 + static_cast<size_t>(rank) * 17) % 1021) - 510;
}

Status wrong(const char* what, size_t at) {
  return {Code::kInternal, std::string(what) + " is wrong at " + std::to_string(at)};
}

Status check_all_gather(RankContext& c, size_t count) {
  std::vector<int64_t> in(count), out(count * static_cast<size_t>(c.ranks), -1);
  for (size_t i = 0; i < count; ++i) in[i] = value(c.rank, i);
  if (Status ran = c.run(gather_of(in, out, c.ranks)); !ran) return ran;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] != value(static_cast<int>(i / count), i % count)) return wrong("AllGather", i);
  }
  return {};
}

Status check_reduce_scatter(RankContext& c, size_t count) {
  std::vector<int64_t> in(count * static_cast<size_t>(c.ranks)), out(count, -1);
  for (size_t i = 0; i < in.size(); ++i) in[i] = value(c.rank, i);
  Status ran = c.run(scatter_of(in, out, c.ranks, Dtype::kInt64, ReduceOp::kSum));
  if (!ran) return ran;
  for (size_t i = 0; i < count; ++i) {
    int64_t sum = 0;
    for (int r = 0; r < c.ranks; ++r) sum += value(r, static_cast<size_t>(c.rank) * count + i);
    if (out[i] != sum) return wrong("ReduceScatter", i);
  }
  return {};
}

Status check_all_reduce(RankContext& c, size_t count) {
  std::vector<int64_t> data(count);
  for (size_t i = 0; i < count; ++i) data[i] = value(c.rank, i);
  Status ran = c.run(all_reduce_of(data, c.ranks, Dtype::kInt64, ReduceOp::kSum));
  if (!ran) return ran;
  for (size_t i = 0; i < count; ++i) {
    int64_t sum = 0;
    for (int r = 0; r < c.ranks; ++r) sum += value(r, i);
    if (data[i] != sum) return wrong("AllReduce", i);
  }
  return {};
}

// Every collective with small payloads, then 64 KiB per rank.
Status exercise(RankContext& c) {
  for (size_t count : {1u, 77u}) {
    if (Status s = check_all_gather(c, count); !s) return s;
    if (Status s = check_reduce_scatter(c, count); !s) return s;
    if (Status s = check_all_reduce(c, count * 5); !s) return s;
  }
  return check_all_gather(c, 8192);
}

// Peers are numbered densely from 0: the number that a further one gets is how many there were.
int address_vector_entries(Process& process) {
  transport::Transport* transport = process.open_fabric();
  if (transport == nullptr) return 0;
  Engine::Lock lock = process.engine().lock();
  auto itself = transport->add_peer(transport->facts().address);
  return itself.ok() ? static_cast<int>(itself.value()) : -1;
}

double seconds(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

// What a rank asks the store while a group is made.
struct Requests {
  int sets = 0, gets = 0, looks = 0, values = 0;
};

void expect_requests(const Layout& layout, int rank, const Requests& requests) {
  if (layout.large()) {
    EXPECT_LE(requests.values, layout.values(rank)) << "rank " << rank;
    return;
  }
  EXPECT_EQ(requests.sets, layout.sets(rank));
  EXPECT_EQ(requests.gets, layout.gets());
  if (layout.hosts == 1) EXPECT_EQ(requests.looks, 0);  // else with pauses, for each host
}

// --- ranks as processes ------------------------------------------------------------------------------

// What a rank's process writes for the test to read.
struct Record {
  double started = 0, exercised = 0;  // seconds since the test began
  Footprint held;
  Requests requests;
  int peers = 0;
  char failure[400] = "";
};

std::string report_key(int rank) { return "report/" + std::to_string(rank); }

Status be_rank(const Layout& layout, int rank, CountingStore& store, uint64_t begun,
               Record& record) {
  auto process = Process::create();
  if (!process) return process.status();
  auto group =
      Group::create(*process.value(), store, rank, layout.ranks(),
                    {"test", 120'000'000'000, layout.host_of(rank), true, layout.hosts > 1});
  if (!group) return group.status();
  record.started = seconds(now_ns() - begun);
  RankContext context{rank, layout.ranks(), *process.value(), *group.value(), store};
  if (Status status = exercise(context); !status) return status;
  record.exercised = seconds(now_ns() - begun);
  record.held = footprint();
  record.requests = {store.sets, store.gets, store.looks, store.values};
  // All ranks keep what they hold until every rank has measured it.
  if (Status status = check_all_reduce(context, 1); !status) return status;
  record.peers = address_vector_entries(*process.value());
  return {};
}

// The process that the test starts: --rank <rank> <hosts> <ranks per host> <directory> <begun>.
int rank_main(char** argument) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  int rank = std::atoi(argument[0]);
  Layout layout{std::atoi(argument[1]), std::atoi(argument[2])};
  FileStore files(argument[3], std::chrono::seconds(120));
  CountingStore store(files, "");
  Record record;
  Status status = be_rank(layout, rank, store, std::strtoull(argument[4], nullptr, 10), record);
  if (!status) std::snprintf(record.failure, sizeof record.failure, "%s", status.message().c_str());
  const auto* bytes = reinterpret_cast<const uint8_t*>(&record);
  return files.set(report_key(rank), {bytes, bytes + sizeof record}).ok() ? 0 : 1;
}

pid_t start_rank(const Layout& layout, int rank, const std::string& directory, uint64_t begun) {
  std::string words[] = {"/proc/self/exe",
                         "--rank",
                         std::to_string(rank),
                         std::to_string(layout.hosts),
                         std::to_string(layout.ranks_per_host),
                         directory,
                         std::to_string(begun)};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = ::fork();
  if (child == 0) {
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  return child;
}

void run_as_processes(const Layout& layout) {
  char name[] = "/tmp/smddp-scale-XXXXXX";
  ASSERT_NE(::mkdtemp(name), nullptr);
  std::string directory = name;
  uint64_t begun = now_ns();
  std::vector<pid_t> children;
  for (int r = 0; r < layout.ranks(); ++r) {
    children.push_back(start_rank(layout, r, directory, begun));
  }
  for (size_t r = 0; r < children.size(); ++r) {
    int status = -1;
    ASSERT_EQ(::waitpid(children[r], &status, 0), children[r]);
    EXPECT_EQ(status, 0) << "rank " << r;
  }
  FileStore files(directory, std::chrono::milliseconds(10));
  Record most;
  for (int r = 0; r < layout.ranks(); ++r) {
    auto blob = files.get({report_key(r)}, "none");
    ASSERT_TRUE(blob.ok()) << "rank " << r << " left no report";
    Record record;
    std::memcpy(&record, blob.value()[0].data(), sizeof record);
    EXPECT_STREQ(record.failure, "") << "rank " << r;
    expect_requests(layout, r, record.requests);
    EXPECT_EQ(record.peers, layout.peers());
    most.started = std::max(most.started, record.started);
    most.exercised = std::max(most.exercised, record.exercised);
    most.held.pss = std::max(most.held.pss, record.held.pss);
    most.held.rss = std::max(most.held.rss, record.held.rss);
    most.held.descriptors = std::max(most.held.descriptors, record.held.descriptors);
  }
  std::printf(
      "%s, processes: start-up %.2f s, collectives %.2f s, at most %.2f MiB (RSS %.2f) and %d "
      "descriptors in a rank\n",
      layout.text().c_str(), most.started, most.exercised - most.started, most.held.pss / kMiB,
      most.held.rss / kMiB, most.held.descriptors);
  EXPECT_LE(most.held.descriptors, layout.descriptors());
  if (!kSanitized) EXPECT_LT(most.held.pss, kRankBytes);
  std::filesystem::remove_all(directory);
}

// --- further groups ---------------------------------------------------------------------------------

// A hundred groups over the same ranks, as data, tensor and sharding groups of a large model are: each
// used once, all kept.
TEST(Groups, AFurtherOneCostsLittle) {
  constexpr int kGroups = 100;
  constexpr double kGroupBytes = 1 * kMiB;
  Layout layout{4, 4};
  MemoryStore store;
  Footprint after_one, unused, used;
  std::barrier all(layout.ranks());
  auto look = [&](int rank, Footprint& held) {
    all.arrive_and_wait();
    if (rank == 0) held = footprint();
    all.arrive_and_wait();
  };
  on_threads(layout.ranks(), [&](int r) {
    auto process = Process::create();
    ASSERT_TRUE(process.ok());
    std::vector<std::unique_ptr<Group>> groups;
    auto add_groups = [&](int count) {
      while (static_cast<int>(groups.size()) < count) {
        std::string name = "group " + std::to_string(groups.size());
        CountingStore view(store, name + "/");
        auto group = Group::create(*process.value(), view, r, layout.ranks(),
                                   {name, 60'000'000'000, layout.host_of(r), true, true});
        ASSERT_TRUE(group.ok()) << group.status().message();
        EXPECT_EQ(view.sets + view.gets, layout.sets(r) + layout.gets());
        groups.push_back(std::move(group.value()));
      }
    };
    auto use_groups = [&] {
      for (auto& group : groups) {
        CountingStore none(store, "");
        RankContext context{r, layout.ranks(), *process.value(), *group, none};
        for (auto check : {check_all_gather, check_reduce_scatter, check_all_reduce}) {
          Status status = check(context, 100);
          ASSERT_TRUE(status.ok()) << status.message();
        }
      }
    };
    add_groups(1);
    use_groups();
    use_groups();  // two ranks that have connected to each other have taken both connections then
    look(r, after_one);
    add_groups(kGroups);
    look(r, unused);
    use_groups();
    look(r, used);
    all.arrive_and_wait();
  });
  auto each = [&](double bytes) { return bytes / layout.ranks() / (kGroups - 1); };
  std::printf(
      "a further group of %s: %.1f KiB per rank made, %.1f KiB used (RSS %.1f); %d descriptors\n",
      layout.text().c_str(), each(unused.pss - after_one.pss) / 1024,
      each(used.pss - after_one.pss) / 1024, each(used.rss - after_one.rss) / 1024,
      used.descriptors - after_one.descriptors);
  EXPECT_EQ(unused.descriptors, after_one.descriptors);
  EXPECT_EQ(used.descriptors, after_one.descriptors);
  if (!kSanitized) EXPECT_LT(each(used.pss - after_one.pss), kGroupBytes);
}

TEST(Scale, Processes) { run_as_processes({8, 4}); }
TEST(FullScale, Processes32x8) { run_as_processes({32, 8}); }
// Longer than a run of all tests should be: by hand, with --gtest_filter=Longer*.
TEST(LongerScale, Processes8x32) { run_as_processes({8, 32}); }
TEST(LongerScale, Processes256x1) { run_as_processes({256, 1}); }

}  // namespace
}  // namespace smddp::scale

int main(int argc, char** argv) {
  if (argc == 7 && std::string(argv[1]) == "--rank") return smddp::scale::rank_main(argv + 2);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
