// A Store in a directory that all ranks see: for programs that have no c10d::Store, such as the
// core's own benchmark and its tests with many processes.
#pragma once

#include <chrono>
#include <filesystem>

#include "joining/store.h"

namespace smddp {

class FileStore : public Store {
 public:
  // `directory` must exist; its owner removes it.
  FileStore(std::filesystem::path directory, std::chrono::milliseconds timeout)
      : directory_(std::move(directory)), timeout_(timeout) {}
  Status set(const std::string& key, const std::vector<uint8_t>& value) override;
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override;
  bool has(const std::string& key) override;
  void remove(const std::string& key) override;

 private:
  std::filesystem::path path_of(const std::string& key) const;

  std::filesystem::path directory_;
  std::chrono::milliseconds timeout_;
};

}  // namespace smddp
