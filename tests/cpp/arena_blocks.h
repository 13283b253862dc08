// Functions that all tests of arenas use.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "intranode/arena.h"

namespace smddp::intranode {

inline constexpr size_t kMiB = 1 << 20;

// The number of lines of /proc/self/maps and of descriptors of this process that belong to an arena.
inline int segments_left() {
  int found = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    found += line.find("memfd:smddp-arena") != std::string::npos;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    auto target = std::filesystem::read_symlink(entry, gone);
    found += target.string().find("smddp-arena") != std::string::npos;
  }
  return found;
}

inline void fill(std::byte* block, size_t bytes, int value) { std::memset(block, value, bytes); }

inline bool filled(const std::byte* block, size_t bytes, int value) {
  for (size_t i = 0; i < bytes; ++i) {
    if (block[i] != static_cast<std::byte>(value)) return false;
  }
  return true;
}

// Runs `body` in a forked child. Returns the result of `body`, or minus the signal that ended the child.
inline int in_child(const std::function<int()>& body) {
  pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace smddp::intranode
