// Ranks as processes of their own, which are forked from the test's and meet over a store in files.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "file_store.h"
#include "world.h"

namespace smddp {

// A rank for each letter of `layout`; ranks with equal letters share a host. Each runs `body` in a process, and says
// in what it returns what was wrong. Then it destroys its group, and ends.
class Processes {
 public:
  using Body = std::function<std::string(RankContext&)>;

  Processes(const std::string& layout, const Body& body) : Processes(layout, true, body) {}
  // `single_copy`: as in GroupOptions.
  Processes(const std::string& layout, std::optional<bool> single_copy, const Body& body)
      : single_copy_(single_copy),
        directory_(
            std::filesystem::temp_directory_path() /
            ("smddp-processes-" + std::to_string(getpid()) + "-" + std::to_string(serial_++))),
        store_(directory_, std::chrono::seconds(30)) {
    std::filesystem::create_directory(directory_);
    for (int rank = 0; rank < static_cast<int>(layout.size()); ++rank) {
      pid_t pid = fork();
      if (pid == 0) _exit(be_rank(rank, layout, body));
      pids_.push_back(pid);
    }
  }
  ~Processes() {
    for (pid_t pid : pids_) {
      if (pid > 0) kill(pid, SIGKILL);
      if (pid > 0) waitpid(pid, nullptr, 0);
    }
    std::filesystem::remove_all(directory_);
  }
  Store& store() { return store_; }
  void expect_end(int rank) {
    int status = 0;
    pid_t& pid = pids_[static_cast<size_t>(rank)];
    waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    pid = 0;
  }
  void expect_ends() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) expect_end(static_cast<int>(rank));
  }

 private:
  int be_rank(int rank, const std::string& layout, const Body& body) {
    auto process = Process::create(network_of_tests());
    if (!process) return 1;
    CountingStore store(store_, "");
    auto ranks = static_cast<int>(layout.size());
    auto group = Group::create(*process.value(), store, rank, ranks,
                               {.name = "g",
                                .timeout_ns = 20'000'000'000,
                                .host = layout.substr(static_cast<size_t>(rank), 1),
                                .single_copy = single_copy_});
    if (!group) return 1;
    usleep(
        10'000);  // the engine's thread sleeps by now, and drives nothing that it is not asked to
    RankContext context{rank, ranks, *process.value(), *group.value(), store};
    std::string wrong = body(context);
    if (!wrong.empty()) std::fprintf(stderr, "rank %d: %s\n", rank, wrong.c_str());
    return wrong.empty() ? 0 : 1;
  }

  inline static int serial_ = 0;
  const std::optional<bool> single_copy_;
  std::filesystem::path directory_;
  FileStore store_;
  std::vector<pid_t> pids_;
};

inline void say(Store& store, const std::string& key) { (void)store.set(key, {1}); }
inline bool await(Store& store, const std::string& key) { return store.get({key}, "none").ok(); }

}  // namespace smddp
