#include "intranode/peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <climits>

#include "common/align.h"

namespace smddp::intranode {
namespace {

// Attempts to read an entry. If an owner died in the middle of a change, the version stays odd for ever.
constexpr int kLooks = 64;

struct Announced {
  uint64_t base, bytes, device, inode, version, fd;
};

// False if no attempt gave a consistent view of the entry.
bool read_entry(const ArenaEntry& entry, Announced& out) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  for (int look = 0; look < kLooks; ++look) {
    out.version = entry.version.load(std::memory_order_acquire);
    out.base = entry.base.load(kRelaxed);
    out.bytes = entry.bytes.load(kRelaxed);
    out.device = entry.device.load(kRelaxed);
    out.inode = entry.inode.load(kRelaxed);
    out.fd = entry.fd.load(kRelaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (out.version % 2 == 0 && entry.version.load(kRelaxed) == out.version) return true;
  }
  return false;
}

bool plausible(const Announced& a) {
  return a.version != 0 && a.bytes > 0 && a.bytes % kPage == 0 && a.base % kPage == 0 &&
         a.bytes <= static_cast<uint64_t>(PTRDIFF_MAX) && a.base <= UINT64_MAX - a.bytes &&
         a.fd <= INT_MAX;
}

}  // namespace

Result<std::unique_ptr<PeerMemory>> PeerMemory::open(int pid, int table_fd) {
  std::string who = "process " + std::to_string(pid);
  if (table_fd < 0) return Status(Code::kUnavailable, who + " shares no memory");
  FileDescriptor fd(::open(fd_path(pid, table_fd).c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info;
  if (!fd || !holds(fd.get(), sizeof(ArenaTable), &info))
    return Status(Code::kUnavailable, "could not open the table of the shared memory of " + who +
                                          "; the process may have ended");
  auto table = Mapping::map(sizeof(ArenaTable), MAP_SHARED, fd.get(), PROT_READ);
  if (!table) return table.status();
  auto peer = std::make_unique<PeerMemory>();
  peer->pid_ = pid;
  peer->table_ = std::move(table.value());
  if (peer->table()->magic != kArenaMagic)
    return Status(Code::kUnavailable, who + " shares its memory in the format of another version");
  return peer;
}

void PeerMemory::refresh() {
  uint64_t epoch = table()->epoch.load(std::memory_order_acquire);
  uint32_t used = std::min(table()->used.load(std::memory_order_relaxed), kArenaEntries);
  std::vector<Known> known;
  bool complete = true;
  for (uint32_t i = 0; i < used; ++i) {
    Announced a;
    if (!read_entry(table()->entries[i], a)) {
      complete = false;  // the next call reads the table again
      continue;
    }
    if (!plausible(a)) continue;
    auto same = std::find_if(known_.begin(), known_.end(), [&](const Known& k) {
      return k.entry == i && k.version == a.version;
    });
    if (same != known_.end()) {
      known.push_back(std::move(*same));
    } else {
      known.push_back({a.base, a.bytes, a.device, a.inode, a.version, static_cast<int>(a.fd), i});
    }
  }
  std::sort(known.begin(), known.end(),
            [](const Known& a, const Known& b) { return a.base < b.base; });
  known_ = std::move(known);  // unmaps segments that are no longer announced
  last_ = 0;
  epoch_ = complete ? epoch : epoch - 1;
}

std::byte* PeerMemory::look_up(uint64_t address, size_t bytes) {
  auto next = std::upper_bound(known_.begin(), known_.end(), address,
                               [](uint64_t a, const Known& k) { return a < k.base; });
  if (next == known_.begin()) return nullptr;
  Known& segment = *std::prev(next);
  if (!within(segment, address, bytes)) return nullptr;
  if (segment.mapping.data() == nullptr) {
    if (segment.refused) return nullptr;
    map(segment);
    segment.refused = segment.mapping.data() == nullptr;
    if (segment.refused) return nullptr;
  }
  last_ = static_cast<size_t>(std::prev(next) - known_.begin());
  return at(segment, address);
}

void PeerMemory::map(Known& segment) const {
  std::string path = fd_path(pid_, segment.fd);
  struct stat info;
  // The descriptor number may now mean another file, and the pid another process. The inode shows it.
  // It is checked before open() as well, as opening some files has side effects.
  auto same = [&] { return info.st_dev == segment.device && info.st_ino == segment.inode; };
  if (stat(path.c_str(), &info) != 0 || !same()) return;
  FileDescriptor fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd || !holds(fd.get(), segment.bytes, &info) || !same()) return;
  auto mapped = Mapping::map(segment.bytes, MAP_SHARED, fd.get());
  if (!mapped) return;
  segment.mapping = std::move(mapped.value());
  madvise(segment.mapping.data(), segment.bytes, MADV_HUGEPAGE);
  madvise(segment.mapping.data(), segment.bytes,
          MADV_DONTFORK);  // children of this process do not inherit it
}

size_t PeerMemory::mapped() const {
  return static_cast<size_t>(std::count_if(
      known_.begin(), known_.end(), [](const Known& k) { return k.mapping.data() != nullptr; }));
}

}  // namespace smddp::intranode
