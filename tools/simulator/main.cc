// smddp_simulate: what a collective takes on a cluster that is not there, as JSON. docs/dev/scale.md describes it.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "simulator/cluster.h"
#include "simulator/start_up.h"

namespace smddp::simulator {
namespace {

constexpr const char* kUsage =
    "usage: smddp_simulate --hosts N [--ranks-per-host N] [--nics N] [--gbit X] [--latency-us X]\n"
    "         [--message-us X] [--collective all_gather|reduce_scatter|all_reduce|all_to_all]\n"
    "         [--bytes N[,N...]]\n"
    "         [--algorithm auto|direct|log|joint] [--assume LATENCY_US,MESSAGE_US,GB/s] [--ordered "
    "1]\n"
    "         [--calls N] [--view all|rail] [--start-up-only 1]\n"
    "  --gbit      of one NIC, in each direction (default 100)\n"
    "  --bytes     of the whole output of an AllGather, or of a rank's input of another "
    "collective\n"
    "  --assume    the network that the selector believes in (default: the one that is simulated)\n"
    "  --calls     the figures are those of the last one (default 2: the first call meets the "
    "peers)\n"
    "  --view      rail: one rank of each host, with its share of the NICs and of the bytes\n"
    "  --start-up-only  1: what the store serves for the group and for further ones, no "
    "collective\n";

struct Settings {
  Layout layout{2, 1};
  Model model;
  Collective collective = Collective::kAllGather;
  std::vector<size_t> bytes = {1 << 20};
  Algorithm algorithm = Algorithm::kAuto;
  std::string assumed;
  int calls = 2;
  bool rail = false;
  bool start_up_only = false;
};

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "smddp_simulate: %s\n%s", why.c_str(), kUsage);
  std::exit(2);
}

double number(const std::string& name, const std::string& text, double least) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= least)) {
    std::ostringstream limit;
    limit << least;
    refuse(name + " is \"" + text + "\"; it may be a number from " + limit.str() + " on");
  }
  return value;
}

int whole(const std::string& name, const std::string& text) {
  return static_cast<int>(number(name, text, 1));
}

std::vector<size_t> sizes(const std::string& text) {
  std::vector<size_t> all;
  std::istringstream list(text);
  for (std::string item; std::getline(list, item, ',');)
    all.push_back(static_cast<size_t>(number("--bytes", item, 1)));
  if (all.empty()) refuse("--bytes names no size");
  return all;
}

Collective collective_of(const std::string& text) {
  const std::map<std::string, Collective> known = {{"all_gather", Collective::kAllGather},
                                                   {"reduce_scatter", Collective::kReduceScatter},
                                                   {"all_reduce", Collective::kAllReduce},
                                                   {"all_to_all", Collective::kAllToAll}};
  auto found = known.find(text);
  if (found == known.end())
    refuse("--collective is \"" + text +
           "\"; it may be all_gather, reduce_scatter, all_reduce or all_to_all");
  return found->second;
}

void set(Settings& settings, const std::string& name, const std::string& value) {
  if (name == "--hosts") {
    settings.layout.hosts = whole(name, value);
  } else if (name == "--ranks-per-host") {
    settings.layout.ranks_per_host = whole(name, value);
  } else if (name == "--nics") {
    settings.model.nics = whole(name, value);
  } else if (name == "--gbit") {
    settings.model.bytes_per_ns = number(name, value, 1e-6) / 8;
  } else if (name == "--latency-us") {
    settings.model.latency_ns = 1e3 * number(name, value, 0);
  } else if (name == "--message-us") {
    settings.model.message_ns = 1e3 * number(name, value, 0);
  } else if (name == "--ordered") {
    settings.model.ordered = number(name, value, 0) != 0;
  } else if (name == "--collective") {
    settings.collective = collective_of(value);
  } else if (name == "--bytes") {
    settings.bytes = sizes(value);
  } else if (name == "--algorithm") {
    auto algorithm = parse_algorithm(value);
    if (!algorithm)
      refuse("--algorithm is \"" + value + "\"; it may be auto, direct, log or joint");
    settings.algorithm = algorithm.value();
  } else if (name == "--assume") {
    if (!parse_network_model(value)) refuse("--assume takes three numbers above 0, as 20,4,1.25");
    settings.assumed = value;
  } else if (name == "--calls") {
    settings.calls = whole(name, value);
  } else if (name == "--view") {
    if (value != "all" && value != "rail") refuse("--view may be all or rail");
    settings.rail = value == "rail";
  } else if (name == "--start-up-only") {
    settings.start_up_only = number(name, value, 0) != 0;
  } else {
    refuse("unknown option " + name);
  }
}

Settings parse(int argc, char** argv) {
  Settings settings;
  settings.model.bytes_per_ns = 12.5;
  settings.model.moves_writes = false;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) refuse(std::string(argv[i]) + " needs a value");
    set(settings, argv[i], argv[i + 1]);
  }
  if (settings.model.nics > static_cast<int>(wire::kMaxRails))
    refuse("--nics may be at most " + std::to_string(wire::kMaxRails));
  return settings;
}

size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Memory of all ranks in common: what they would write is the same, and nothing reads it.
std::byte* shared_memory(size_t bytes) {
  void* at = ::mmap(nullptr, std::max<size_t>(1, bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) refuse("no memory for " + std::to_string(bytes) + " bytes");
  return static_cast<std::byte*>(at);
}

std::vector<std::shared_ptr<Operation>> operations(Collective collective, size_t bytes, int ranks,
                                                   std::byte* all, std::byte* other) {
  std::vector<std::shared_ptr<Operation>> made;
  bool gathers = collective == Collective::kAllGather;
  size_t element = sums(collective) ? sizeof(float) : 1;
  auto starts = pattern::equal_parts(std::max<size_t>(1, bytes / element), ranks, 1);
  auto blocks = [&](Blocks& to, std::byte* at) {
    for (size_t r = 0; r + 1 < starts.size(); ++r) {
      to.add(at + starts[r] * element, (starts[r + 1] - starts[r]) * element);
      to.end_block();
    }
  };
  auto equal_blocks = [&](Blocks& to, std::byte* at) {
    size_t each = std::max<size_t>(1, bytes / static_cast<size_t>(ranks));
    for (size_t r = 0; r < static_cast<size_t>(ranks); ++r) {
      to.add(at + r * each, each);
      to.end_block();
    }
  };
  for (int rank = 0; rank < ranks; ++rank) {
    auto operation = std::make_shared<Operation>();
    operation->collective = collective;
    operation->element_size = element;
    operation->digest = bytes;
    auto own = static_cast<size_t>(rank);
    size_t own_bytes = (starts[own + 1] - starts[own]) * element;
    if (gathers) {
      blocks(operation->output, all);
      operation->input.add(all + starts[own], own_bytes);
      operation->input.end_block();
    } else if (collective == Collective::kAllToAll) {
      equal_blocks(operation->input, all);
      equal_blocks(operation->output, other);
    } else {
      operation->dtype = Dtype::kFloat32;
      operation->reduce_op = ReduceOp::kSum;
      blocks(operation->input, all);
      if (collective == Collective::kAllReduce) {
        blocks(operation->output, other);
      } else {
        operation->output.add(other, own_bytes);
        operation->output.end_block();
      }
    }
    made.push_back(std::move(operation));
  }
  return made;
}

// Each byte of other hosts' blocks enters a host once, by all of its NICs at the same time. In an all-to-all each
// rank of a host has blocks of its own. In an AllReduce partial sums enter as well as sums.
double bound_seconds(const Settings& settings, size_t bytes) {
  if (settings.layout.hosts == 1) return 0;
  double host = settings.model.bytes_per_ns * settings.model.nics;
  double others = static_cast<double>(bytes) * (settings.layout.hosts - 1) / settings.layout.hosts;
  if (settings.collective == Collective::kAllToAll) others *= settings.layout.ranks_per_host;
  if (settings.collective == Collective::kAllReduce) others *= 2;
  return (settings.model.latency_ns + others / host) * 1e-9;
}

// The k rails of a host do the same at the same time: one of them, with its part of all.
Settings one_rail(Settings settings) {
  auto k = static_cast<size_t>(settings.layout.ranks_per_host);
  settings.layout.ranks_per_host = 1;
  settings.model.bytes_per_ns /= static_cast<double>(k);
  for (size_t& bytes : settings.bytes) bytes = std::max<size_t>(1, bytes / k);
  return settings;
}

void print(const Outcome& outcome, const Operation& operation, size_t bytes, double bound,
           size_t memory) {
  const NetworkCounters& net = outcome.network;
  std::printf(
      "{\"bytes\": %zu, \"seconds\": %.9g, \"first_seconds\": %.9g, \"bound_seconds\": %.9g, "
      "\"path\": \"%s\", \"fragments\": %u, \"messages\": %llu, \"message_bytes\": %llu, "
      "\"writes\": %llu, \"write_bytes\": %llu, \"most_nic_bytes_out\": %.9g, "
      "\"most_nic_bytes_in\": %.9g,"
      "\"waiting_messages\": %llu, \"passes\": %llu, \"most_passes\": %llu, \"idle_looks\": %llu, "
      "\"memory_bytes_per_rank\": %zu, \"simulation_seconds\": %.3f}",
      bytes, outcome.seconds, outcome.first_seconds, bound, operation.path.c_str(),
      operation.fragments, static_cast<unsigned long long>(net.messages),
      static_cast<unsigned long long>(net.message_bytes),
      static_cast<unsigned long long>(net.writes), static_cast<unsigned long long>(net.write_bytes),
      outcome.most_bytes_out, outcome.most_bytes_in,
      static_cast<unsigned long long>(net.waiting_messages),
      static_cast<unsigned long long>(outcome.passes),
      static_cast<unsigned long long>(outcome.most_passes),
      static_cast<unsigned long long>(outcome.idle_looks), memory, outcome.real_seconds);
}

void print(const StoreTraffic& traffic) {
  std::printf(
      "\"store_sets\": %llu, \"store_values\": %llu, \"store_bytes\": %llu, "
      "\"most_store_values\": %llu, \"store_keys_left\": %llu, ",
      static_cast<unsigned long long>(traffic.sets),
      static_cast<unsigned long long>(traffic.values),
      static_cast<unsigned long long>(traffic.bytes),
      static_cast<unsigned long long>(traffic.most_values),
      static_cast<unsigned long long>(traffic.keys_left));
}

[[noreturn]] void give_up(const Status& why) {
  std::fprintf(stderr, "smddp_simulate: %s\n", why.message().c_str());
  std::exit(1);
}

// Groups that a job makes after that of all its ranks: 8 ranks of one host, 8 of as many hosts, and all ranks.
void print_further_groups(const Layout& layout, const RankInfo& sample) {
  const int per_host = layout.ranks_per_host;
  std::printf("\"further_groups\": [");
  std::vector<std::pair<int, int>> groups;  // number of ranks, step from one to the next
  if (per_host >= 8) groups.emplace_back(8, 1);
  if (layout.hosts >= 8 && layout.ranks() > 8) groups.emplace_back(8, per_host);
  groups.emplace_back(layout.ranks(), 1);
  const char* separator = "";
  for (auto [count, step] : groups) {
    std::vector<Rank> members;
    for (int i = 0; i < count; ++i) members.push_back(i * step);
    auto traffic = count_further_group(layout.hosts, per_host, sample, members);
    if (!traffic) give_up(traffic.status());
    std::printf("%s\n  {\"ranks\": %d, \"hosts\": %d, ", separator, count,
                members.back() / per_host + 1);
    print(traffic.value());
    std::printf("\"of\": %d}", layout.ranks());
    separator = ",";
  }
  std::printf("\n], ");
}

int simulate(const Settings& asked) {
  Settings settings = asked.rail ? one_rail(asked) : asked;
  if (settings.assumed.empty()) {
    std::ostringstream model;
    model << settings.model.latency_ns / 1e3 << ','
          << std::max(1e-3, settings.model.message_ns / 1e3) << ','
          << settings.model.bytes_per_ns * settings.model.nics;
    settings.assumed = model.str();
  }
  std::string curve = "curve=" + settings.assumed;
  std::replace(curve.begin(), curve.end(), ',', ':');
  ::setenv("SMDDP_DEBUG", curve.c_str(), 1);
  size_t before = resident_bytes();
  auto cluster = Cluster::create(settings.model, settings.layout);
  if (!cluster) give_up(cluster.status());
  auto ranks = static_cast<size_t>(settings.layout.ranks());
  size_t made = resident_bytes() - before;
  auto traffic =
      count_start_up(asked.layout.hosts, asked.layout.ranks_per_host, cluster.value()->rank_info());
  if (!traffic) give_up(traffic.status());
  std::printf(
      "{\"hosts\": %d, \"ranks_per_host\": %d, \"view\": \"%s\", \"nics\": %d, "
      "\"gbit\": %.9g, \"latency_us\": %.9g, \"message_us\": %.9g, \"assumed\": \"%s\", "
      "\"rank_info_bytes\": %zu, \"group_bytes_per_rank\": %zu, ",
      asked.layout.hosts, asked.layout.ranks_per_host, asked.rail ? "rail" : "all",
      asked.model.nics, asked.model.bytes_per_ns * 8, asked.model.latency_ns / 1e3,
      asked.model.message_ns / 1e3, settings.assumed.c_str(), cluster.value()->rank_info_bytes(),
      made / ranks);
  print(traffic.value());
  if (asked.start_up_only) {
    print_further_groups(asked.layout, cluster.value()->rank_info());
    settings.bytes.clear();
  }
  std::printf("\"results\": [");
  Tuning tuning;
  tuning.algorithm = settings.algorithm;
  for (size_t i = 0; i < settings.bytes.size(); ++i) {
    size_t bytes = settings.bytes[i];
    std::byte* all = shared_memory(bytes + 4 * ranks);
    std::byte* other = shared_memory(bytes + 4 * ranks);
    Outcome outcome;
    std::vector<std::shared_ptr<Operation>> last;
    for (int call = 0; call < settings.calls; ++call) {
      last = operations(settings.collective, bytes, settings.layout.ranks(), all, other);
      auto run = cluster.value()->run(last, tuning);
      if (!run) give_up(run.status());
      outcome = run.value();
    }
    std::printf("%s\n  ", i > 0 ? "," : "");
    print(outcome, *last[0], asked.bytes[i], bound_seconds(asked, asked.bytes[i]),
          (resident_bytes() - before) / ranks);
    std::fflush(stdout);
    ::munmap(all, bytes + 4 * ranks);
    ::munmap(other, bytes + 4 * ranks);
  }
  std::printf("\n]}\n");
  std::fflush(stdout);
  // The process ends here, without the time that the end of thousands of groups would take.
  std::_Exit(0);
}

}  // namespace
}  // namespace smddp::simulator

int main(int argc, char** argv) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files);
  }
  return smddp::simulator::simulate(smddp::simulator::parse(argc, argv));
}
