#include "joining/file_store.h"

#include <fstream>
#include <iterator>

#include "common/replace_file.h"
#include "joining/pause.h"

namespace smddp {
namespace {

// Hundreds of processes that look for each other must leave the cores to those that still start.
constexpr std::chrono::milliseconds kLongestPause{16};

}  // namespace

// A key has slashes; the name of a file has none.
std::filesystem::path FileStore::path_of(const std::string& key) const {
  std::string name = key;
  for (char& c : name) c = c == '/' ? '@' : c;
  return directory_ / name;
}

Status FileStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  return replace_file(path_of(key), {reinterpret_cast<const char*>(value.data()), value.size()});
}

Result<std::vector<std::vector<uint8_t>>> FileStore::get(const std::vector<std::string>& keys,
                                                         const std::string& stop) {
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

bool FileStore::has(const std::string& key) { return std::filesystem::exists(path_of(key)); }

void FileStore::remove(const std::string& key) {
  std::error_code ignored;
  std::filesystem::remove(path_of(key), ignored);
}

}  // namespace smddp
