// Feeds each file of a folder, or a file, to one of the fuzz targets: the corpora in the tests.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" {
#define TARGET(name) int fuzz_##name(const uint8_t* data, size_t size);
#include "targets.inc"
#undef TARGET
}

namespace {

struct Target {
  const char* name;
  int (*run)(const uint8_t*, size_t);
};

constexpr Target kTargets[] = {
#define TARGET(name) {#name, fuzz_##name},
#include "targets.inc"
#undef TARGET
};

// A copy of exactly the file's size: a sanitizer sees each byte that is read beyond it.
void replay(const Target& target, const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<uint8_t> bytes(text.begin(), text.end());
  std::fprintf(stderr, "%s\n", path.c_str());
  target.run(bytes.data(), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
  for (const Target& target : kTargets) {
    if (argc != 3 || std::strcmp(argv[1], target.name) != 0) continue;
    int files = 0;
    if (!std::filesystem::is_directory(argv[2])) {
      replay(target, argv[2]);
      return 0;
    }
    for (const auto& entry : std::filesystem::directory_iterator(argv[2])) {
      replay(target, entry.path());
      ++files;
    }
    std::printf("%d files\n", files);
    return files > 0 ? 0 : 1;
  }
  std::fprintf(stderr, "usage: fuzz_replay TARGET FOLDER-OR-FILE; the targets:");
  for (const Target& target : kTargets) std::fprintf(stderr, " %s", target.name);
  std::fprintf(stderr, "\n");
  return 2;
}
