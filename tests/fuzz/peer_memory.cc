// The table in which a hostile neighbour announces its memory.
#include "intranode/peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "input.h"

using namespace smddp;
using namespace smddp::intranode;

namespace {

constexpr size_t kBytes = 64 << 10;

int segment(size_t bytes, int seals) {
  int fd = ::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) std::abort();
  if (seals != 0) (void)::fcntl(fd, F_ADD_SEALS, seals);
  return fd;
}

void fill(ArenaEntry& entry, fuzz::Input& input, const int (&files)[2]) {
  struct stat info = {};
  int file = files[input.up_to(1)];
  (void)::fstat(file, &info);
  bool right = input.up_to(3) != 3;
  entry.version = input.up_to(5);
  entry.base = input.up_to(31) * 4096 + (right ? 0 : input.offset(0));
  entry.bytes = right ? input.up_to(32) * 4096 : input.offset(kBytes);
  entry.device = info.st_dev;
  entry.inode = right ? info.st_ino : input.offset(info.st_ino);
  entry.fd = right ? static_cast<uint64_t>(file) : input.offset(static_cast<uint64_t>(file));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The second one could be shrunk: it must never be mapped.
  static const int files[2] = {segment(kBytes, F_SEAL_SHRINK), segment(kBytes, 0)};
  static const int table_file = segment(sizeof(ArenaTable), F_SEAL_SHRINK);
  static auto* table = static_cast<ArenaTable*>(
      ::mmap(nullptr, sizeof(ArenaTable), PROT_READ | PROT_WRITE, MAP_SHARED, table_file, 0));
  fuzz::Input input(data, size);
  std::memset(static_cast<void*>(table), 0, sizeof *table);
  table->magic = input.up_to(15) == 15 ? input.number<uint64_t>() : kArenaMagic;
  auto peer = PeerMemory::open(::getpid(), table_file);
  if (!peer.ok()) return 0;
  while (!input.empty()) {
    size_t action = input.up_to(3);
    if (action == 0) {
      fill(table->entries[input.up_to(kArenaEntries - 1)], input, files);
      table->used = input.up_to(7) == 7 ? input.number<uint32_t>() : kArenaEntries;
      table->epoch = input.number<uint8_t>();
    } else {
      uint64_t address = input.up_to(31) * 4096 + input.offset(4096);
      size_t bytes = input.offset(4096);
      std::byte* at = peer.value()->find(reinterpret_cast<const std::byte*>(address), bytes);
      if (at == nullptr || bytes == 0) continue;
      if (bytes > kBytes) std::abort();
      volatile std::byte touched = at[0];
      touched = at[bytes - 1];
      (void)touched;
    }
  }
  return 0;
}
