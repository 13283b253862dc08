// A Store in a directory that all ranks see: for programs that have no c10d::Store, the core's own benchmarks and
// its tests with many processes.
#pragma once

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "common/replace_file.h"
#include "joining/store.h"

namespace smddp {

class FileStore : public Store {
 public:
  // `directory` must exist; its owner removes it.
  FileStore(std::filesystem::path directory, std::chrono::milliseconds timeout)
      : directory_(std::move(directory)), timeout_(timeout) {}

  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    return replace_file(path_of(key), {reinterpret_cast<const char*>(value.data()), value.size()});
  }

  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    auto until = std::chrono::steady_clock::now() + timeout_;
    std::vector<std::vector<uint8_t>> values;
    Pause pause(kLongestPause);
    for (const std::string& key : keys) {
      std::filesystem::path path = path_of(key);
      for (;;) {
        std::ifstream in(path, std::ios::binary);
        if (in) {
          values.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
          break;
        }
        if (has(stop)) return Status(Code::kAborted, stop + " is in " + directory_.string());
        if (std::chrono::steady_clock::now() > until) {
          return Status(Code::kTimeout, "no " + key + " in " + directory_.string());
        }
        pause.sleep();
      }
    }
    return values;
  }

  bool has(const std::string& key) override { return std::filesystem::exists(path_of(key)); }

  void remove(const std::string& key) override {
    std::error_code ignored;
    std::filesystem::remove(path_of(key), ignored);
  }

 private:
  // Hundreds of processes that look for each other must leave the cores to those that still start.
  static constexpr std::chrono::milliseconds kLongestPause{16};

  // A key has slashes; the name of a file has none.
  std::filesystem::path path_of(const std::string& key) const {
    std::string name = key;
    for (char& c : name) c = c == '/' ? '@' : c;
    return directory_ / name;
  }

  std::filesystem::path directory_;
  std::chrono::milliseconds timeout_;
};

}  // namespace smddp
