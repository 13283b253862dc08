#include "intranode/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>

#include "common/align.h"
#include "common/env.h"
#include "common/processor.h"

namespace smddp::intranode {
namespace {

constexpr size_t kHugePage = 2 << 20;

// The arena refuses requests that are larger than the host's memory. The kernel would grant them, as
// the pages of a memfd are allocated at their first touch, and the OOM killer would end the process
// later.
size_t memory_of_host() {
  long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
  return pages > 0 && size > 0 ? static_cast<size_t>(pages) * static_cast<size_t>(size)
                               : SIZE_MAX / 2;
}

// Without a descriptor if the kernel has no such memory.
Shared create_segment(size_t bytes, bool huge) {
  unsigned flags = huge ? MFD_HUGETLB | 21u << 26 : 0;  // MFD_HUGE_2MB of linux/memfd.h
  auto made = create_shared("smddp-arena", bytes, flags);
  if (!made) return {};
  Shared shared = std::move(made.value());
  std::byte* address = shared.mapping.data();
  if (huge) {
    // A control group may still refuse reserved pages at their first touch. MADV_POPULATE_WRITE
    // turns that into an error; without it, it is SIGBUS. The flag exists since Linux 5.14; older
    // kernels return an error, so huge pages are not used there.
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
    if (madvise(address, bytes, kPopulateWrite) != 0) return {};
  } else {
    madvise(address, bytes, MADV_HUGEPAGE);  // has an effect if shmem_enabled allows it
  }
  return shared;
}

size_t fork_copy_bytes() {
  double mib = env::debug_number("fork_copy_mib").value_or(1024);
  return mib >= 0 && mib < 1e12 ? static_cast<size_t>(mib * (1 << 20)) : SIZE_MAX;
}

}  // namespace

Arena& Arena::process() {
  static Arena* arena = [] {
    Options options;
    options.fork_copy = fork_copy_bytes();
    return new Arena(options);
  }();
  return *arena;
}

Arena::Arena(const Options& options) : options_(options) {
  table_ = create_segment(align_up(sizeof(ArenaTable), kPage), false);
  if (table_.fd) table()->magic = kArenaMagic;
  handle_forks(true);
}

Arena::~Arena() {
  handle_forks(false);
  for (auto& [base, segment] : segments_) {
    if (!inert_) announce(segment, false);
    munmap(base, segment.bytes);
  }
}

int Arena::table_fd() const {
  std::lock_guard lock(mutex_);
  return table_.fd.get();
}

std::byte* Arena::allocate(size_t bytes) {
  static const size_t kMost = memory_of_host();
  std::lock_guard lock(mutex_);
  if (inert_) return nullptr;
  std::byte* address = nullptr;
  if (table_.fd && bytes <= kMost) {
    size_t align = bytes < kPage ? kCacheLine : kPage;
    size_t size = align_up(std::max<size_t>(bytes, 1), align);
    address = carve(size, align);
    if (address == nullptr && grow(size)) address = carve(size, align);
  }
  if (address == nullptr) ++statistics_.refused;
  return address;
}

// Takes the block from the smallest free run that holds it. The rest of the run stays free.
std::byte* Arena::carve(size_t bytes, size_t align) {
  for (auto it = free_.lower_bound({bytes, nullptr}); it != free_.end(); ++it) {
    auto start = reinterpret_cast<uintptr_t>(it->second);
    size_t before = align_up(start, align) - start;
    if (it->first < before + bytes) continue;
    auto block = blocks_.find(it->second);
    unindex(block);
    const Block whole = block->second;
    // The arena does not know which pages of the run have been touched. It assumes that as many of
    // them as possible are in the new block.
    size_t backed = whole.backed - std::min(whole.backed, bytes);
    std::byte* address = block->first + before;
    if (size_t after = whole.bytes - before - bytes; after > 0) {
      index(
          blocks_
              .emplace(address + bytes, Block{after, whole.segment, true, std::min(after, backed)})
              .first);
      backed -= std::min(after, backed);
    }
    if (before > 0) {
      block->second = Block{before, whole.segment, true, std::min(before, backed)};
      index(block);
    } else {
      blocks_.erase(block);
    }
    blocks_.emplace(address, Block{bytes, whole.segment, false, 0});
    statistics_.in_use += bytes;
    statistics_.peak = std::max(statistics_.peak, statistics_.in_use);
    ++statistics_.blocks;
    return address;
  }
  return nullptr;
}

bool Arena::free(void* address) {
  if (!may_own(address)) return false;
  std::lock_guard lock(mutex_);
  auto block = blocks_.find(static_cast<std::byte*>(address));
  if (block == blocks_.end() || block->second.free) return false;
  Block& b = block->second;
  statistics_.in_use -= b.bytes;
  --statistics_.blocks;
  b.free = true;
  if (inert_) {
    if (b.bytes >= kPage) madvise(address, b.bytes, MADV_DONTNEED);
    return true;
  }
  b.backed = b.bytes;
  block = merge(block);
  if (Segment* s = block->second.segment;
      block->second.bytes == s->bytes && s->bytes > options_.keep) {
    release(s);
  }
  // Down to half of the bound, so that the next few blocks can be freed and allocated without a
  // system call each.
  if (statistics_.kept > options_.keep) give_back_pages(options_.keep / 2);
  return true;
}

// `block` is free and not yet in the free list. Merges it with the free blocks beside it and puts the
// result into the list.
Arena::Blocks::iterator Arena::merge(Blocks::iterator block) {
  auto absorb = [&](Blocks::iterator left, Blocks::iterator right) {
    left->second.bytes += right->second.bytes;
    left->second.backed += right->second.backed;
    blocks_.erase(right);
    return left;
  };
  auto joins = [&](Blocks::iterator other) {
    return other->second.free && other->second.segment == block->second.segment;
  };
  if (auto next = std::next(block); next != blocks_.end() && joins(next)) {
    unindex(next);
    absorb(block, next);
  }
  if (block != blocks_.begin() && joins(std::prev(block))) {
    auto previous = std::prev(block);
    unindex(previous);
    block = absorb(previous, block);
  }
  index(block);
  return block;
}

void Arena::index(Blocks::iterator block) {
  free_.emplace(block->second.bytes, block->first);
  statistics_.kept += block->second.backed;
}

void Arena::unindex(Blocks::iterator block) {
  free_.erase({block->second.bytes, block->first});
  statistics_.kept -= block->second.backed;
}

void Arena::trim() {
  std::lock_guard lock(mutex_);
  if (inert_) return;
  give_back_pages(0);
  for (auto it = segments_.begin(); it != segments_.end();) {
    Segment* segment = &(it++)->second;
    auto first = blocks_.find(segment->base);
    if (first->second.free && first->second.bytes == segment->bytes) release(segment);
  }
}

// Largest free runs first, until at most `down_to` bytes of free pages are left.
void Arena::give_back_pages(size_t down_to) {
  for (auto it = free_.end(); it != free_.begin() && statistics_.kept > down_to;) {
    --it;
    auto block = blocks_.find(it->second);
    if (block->second.backed == 0) continue;
    if (block->second.bytes < kPage) return;
    if (Segment* s = block->second.segment; block->second.bytes == s->bytes) {
      it = std::next(it);
      release(s);
    } else {
      return_pages(block);
    }
  }
}

void Arena::return_pages(Blocks::iterator block) {
  Segment& segment = *block->second.segment;
  auto offset = static_cast<size_t>(block->first - segment.base);
  size_t from = align_up(offset, kPage), to = (offset + block->second.bytes) / kPage * kPage;
  // A hole in a segment of huge pages would give up their reservation, and the next touch could end
  // in SIGBUS. Huge pages are therefore given back only with their whole segment.
  if (!segment.huge && from < to) {
    fallocate(segment.fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(from), static_cast<off_t>(to - from));
  }
  statistics_.kept -= block->second.backed;
  block->second.backed = 0;
}

bool Arena::grow(size_t bytes) {
  size_t size = std::clamp(std::bit_ceil(std::max<size_t>(statistics_.reserved, 1)),
                           options_.first_segment, options_.largest_growth);
  if (bytes > size) size = align_up(bytes, kHugePage);
  if (options_.huge_pages && size % kHugePage == 0 && add_segment(size, true)) return true;
  return add_segment(size, false);
}

bool Arena::add_segment(size_t bytes, bool huge) {
  uint32_t entry = 0;
  while (entry < kArenaEntries &&
         table()->entries[entry].bytes.load(std::memory_order_relaxed) != 0) {
    ++entry;
  }
  if (entry == kArenaEntries) return false;
  Shared shared = create_segment(bytes, huge);
  if (!shared.fd) return false;
  auto* base = shared.mapping.release();
  madvise(base, bytes, MADV_DONTFORK);
  Segment& segment =
      segments_.emplace(base, Segment{base, bytes, std::move(shared.fd), entry, huge})
          .first->second;
  auto start = reinterpret_cast<uintptr_t>(base);
  lowest_.store(std::min(lowest_.load(std::memory_order_relaxed), start),
                std::memory_order_relaxed);
  highest_.store(std::max(highest_.load(std::memory_order_relaxed), start + bytes),
                 std::memory_order_relaxed);
  index(blocks_.emplace(base, Block{bytes, &segment, true, 0}).first);
  ++statistics_.segments;
  statistics_.reserved += bytes;
  if (huge) statistics_.huge += bytes;
  announce(segment, true);
  return true;
}

// The segment must have no live blocks.
void Arena::release(Segment* segment) {
  announce(*segment, false);
  auto block = blocks_.find(segment->base);
  unindex(block);
  blocks_.erase(block);
  munmap(segment->base, segment->bytes);
  --statistics_.segments;
  statistics_.reserved -= segment->bytes;
  if (segment->huge) statistics_.huge -= segment->bytes;
  segments_.erase(segment->base);  // closes the descriptor
}

void Arena::announce(const Segment& segment, bool present) {
  struct stat info = {};
  fstat(segment.fd.get(), &info);
  constexpr auto kRelaxed = std::memory_order_relaxed;
  ArenaEntry& entry = table()->entries[segment.entry];
  uint64_t version = entry.version.load(kRelaxed);
  entry.version.store(version + 1, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  entry.base.store(reinterpret_cast<uint64_t>(segment.base), kRelaxed);
  entry.bytes.store(present ? segment.bytes : 0, kRelaxed);
  entry.device.store(info.st_dev, kRelaxed);
  entry.inode.store(info.st_ino, kRelaxed);
  entry.fd.store(static_cast<uint64_t>(segment.fd.get()), kRelaxed);
  entry.version.store(version + 2, std::memory_order_release);
  if (table()->used.load(kRelaxed) <= segment.entry)
    table()->used.store(segment.entry + 1, kRelaxed);
  table()->epoch.fetch_add(1, std::memory_order_release);
}

bool Arena::contains(const void* address, size_t bytes) const {
  if (!may_own(address)) return false;
  std::lock_guard lock(mutex_);
  if (inert_) return false;
  auto start = reinterpret_cast<uintptr_t>(address);
  auto next = segments_.upper_bound(reinterpret_cast<std::byte*>(start));
  if (next == segments_.begin()) return false;
  const Segment& segment = std::prev(next)->second;
  size_t offset = start - reinterpret_cast<uintptr_t>(segment.base);
  return offset < segment.bytes && bytes <= segment.bytes - offset;
}

Arena::Statistics Arena::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace smddp::intranode
