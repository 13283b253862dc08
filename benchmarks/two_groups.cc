// Two groups over the same ranks: one carries out a large AllGather while the other makes small ones, and two
// large ones at the same time. Two processes, as ranks of two hosts or of one:
//
//   two_groups_benchmark [MiB of the large one [hosts]]
//
// Prints the time of the small ones alone and beside the large one (median, 99%, longest), and the times of
// two large ones that begin together.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "common/clock.h"
#include "file_store.h"
#include "group/group.h"

using namespace smddp;

namespace {

constexpr int kRanks = 2;
constexpr size_t kSmall = 1024;  // bytes of a rank
constexpr size_t kMostSmall = 5000;

[[noreturn]] void give_up(const std::string& why) {
  std::printf("%s\n", why.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

struct Gather {
  explicit Gather(size_t bytes) : in(bytes, std::byte{1}), out(bytes * kRanks, std::byte{2}) {}
  std::shared_ptr<Operation> operation() {
    auto op = std::make_shared<Operation>();
    op->collective = Collective::kAllGather;
    op->digest = in.size();
    op->input.add(in.data(), in.size());
    op->input.end_block();
    for (int r = 0; r < kRanks; ++r) {
      op->output.add(out.data() + static_cast<size_t>(r) * in.size(), in.size());
      op->output.end_block();
    }
    return op;
  }
  std::vector<std::byte> in, out;
};

void await(Engine& engine, const Operation& operation) {
  engine.wait(operation);
  if (!operation.status()) give_up(operation.status().message());
}

double run(Engine& engine, Group& group, Gather& gather) {
  uint64_t begun = now_ns();
  auto op = gather.operation();
  group.submit(op, {}, false);
  await(engine, *op);
  return static_cast<double>(now_ns() - begun) * 1e-3;
}

void print(const char* what, std::vector<double> us) {
  if (us.empty()) return;
  std::sort(us.begin(), us.end());
  std::printf("%-34s %6zu calls  median %8.1f us  99%% %8.1f us  longest %8.1f us\n", what,
              us.size(), us[us.size() / 2], us[us.size() * 99 / 100], us.back());
}

void be_rank(int rank, const std::string& directory, size_t large_bytes, int hosts) {
  FileStore store(directory, std::chrono::seconds(30));
  auto process = Process::create();
  if (!process) give_up(process.status().message());
  std::vector<std::unique_ptr<Group>> groups;
  for (const char* name : {"small", "large", "second"}) {
    Group::Options options;
    options.name = name;
    options.host = "host-" + std::to_string(hosts > 1 ? rank : 0);
    PrefixStore prefixed(store, std::string(name) + "/");
    auto made = Group::create(*process.value(), prefixed, rank, kRanks, options);
    if (!made) give_up(made.status().message());
    groups.push_back(std::move(made.value()));
  }
  Engine& driver = process.value()->engine();
  Gather small(kSmall), large(large_bytes / kRanks), second(large_bytes / kRanks);
  Gather* both[] = {&large, &second};
  for (int i = 0; i < 100; ++i) run(driver, *groups[0], small);
  std::vector<double> alone, beside;
  for (size_t i = 0; i < 2000; ++i) alone.push_back(run(driver, *groups[0], small));
  double large_alone = run(driver, *groups[1], large);

  // Both ranks make equally many small calls: rank 0 says after each whether there is one more.
  auto op = large.operation();
  groups[1]->submit(op, {}, true);
  uint64_t begun = now_ns();
  double large_beside = 0;
  for (bool more = true; more;) {
    small.in[0] = std::byte{!op->complete() && beside.size() < kMostSmall};
    beside.push_back(run(driver, *groups[0], small));
    more = small.out[0] == std::byte{1};
    if (large_beside == 0 && op->complete())
      large_beside = static_cast<double>(now_ns() - begun) * 1e-3;
  }
  await(driver, *op);
  if (large_beside == 0) large_beside = static_cast<double>(now_ns() - begun) * 1e-3;

  double times[2] = {};
  std::shared_ptr<Operation> ops[2];
  begun = now_ns();
  for (int g : {0, 1}) {
    ops[g] = both[g]->operation();
    groups[static_cast<size_t>(1 + g)]->submit(ops[g], {}, true);
  }
  while (times[0] == 0 || times[1] == 0) {
    int first = times[0] == 0 ? 0 : 1;
    driver.wait(*ops[first], std::chrono::milliseconds(1));
    for (int g : {0, 1}) {
      if (times[g] == 0 && ops[g]->complete())
        times[g] = static_cast<double>(now_ns() - begun) * 1e-3;
    }
  }
  if (rank != 0) return;
  print("small, alone", alone);
  print("small, beside the large one", beside);
  std::printf("large: %.1f ms alone, %.1f ms beside the small ones\n", large_alone * 1e-3,
              large_beside * 1e-3);
  std::printf("two large ones together: %.1f ms and %.1f ms\n", times[0] * 1e-3, times[1] * 1e-3);
}

}  // namespace

int main(int count, char** arguments) {
  size_t large = (count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1024) << 20;
  int hosts = count > 2 ? std::atoi(arguments[2]) : 2;
  char directory[] = "/tmp/smddp-two-groups-XXXXXX";
  if (mkdtemp(directory) == nullptr) give_up("no directory for the store");
  std::vector<pid_t> children;
  for (int rank = 0; rank < kRanks; ++rank) {
    pid_t child = fork();
    if (child == 0) {
      be_rank(rank, directory, large, hosts);
      std::fflush(stdout);
      std::_Exit(0);
    }
    children.push_back(child);
  }
  int failed = 0;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed |= status;
  }
  std::filesystem::remove_all(directory);
  return failed == 0 ? 0 : 1;
}
