// The handlers of fork() for arenas. arena.h gives the reasons.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "common/align.h"
#include "common/log.h"
#include "intranode/arena.h"

namespace smddp::intranode {
namespace {

// Copies `bytes` bytes at `offset` of the memfd to new, zeroed memory. Skips holes: reading a hole
// through a mapping would allocate pages for it.
bool copy_block(int fd, size_t offset, std::byte* to, size_t bytes) {
  const size_t end = offset + bytes;
  size_t at = offset;
  while (at < end) {
    off_t data = lseek(fd, static_cast<off_t>(at), SEEK_DATA);
    if (data < 0 && errno == ENXIO) return true;  // holes to the end
    if (data >= 0) at = std::max(at, static_cast<size_t>(data));
    if (at >= end) return true;
    off_t hole = data < 0 ? -1 : lseek(fd, static_cast<off_t>(at), SEEK_HOLE);
    size_t until = hole < 0 ? end : std::min(end, static_cast<size_t>(hole));
    while (at < until) {
      ssize_t n = pread(fd, to + (at - offset), until - at, static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += static_cast<size_t>(n);
    }
  }
  return true;
}

}  // namespace

// The arenas of this process, and the pipe through which a forked child tells its parent that its
// copies are made. The mutex is held from before fork() until the parent may continue.
struct Arena::Forks {
  std::mutex mutex;
  std::vector<Arena*> arenas;
  FileDescriptor done_read, done_write;

  static Forks& process() {
    static Forks* forks = [] {
      pthread_atfork([] { process().before(); }, [] { process().in_parent(); },
                     [] { process().in_child(); });
      return new Forks();
    }();
    return *forks;
  }

  void before() {
    mutex.lock();
    bool any = false;
    for (Arena* arena : arenas) {
      arena->mutex_.lock();
      arena->plan_copies();
      any |= !arena->copies_.empty();
    }
    int ends[2];
    // If the pipe can't be made, the parent continues at once, and the child's copies may contain
    // some of the parent's later writes.
    if (any && pipe2(ends, O_CLOEXEC) == 0) {
      done_read = FileDescriptor(ends[0]);
      done_write = FileDescriptor(ends[1]);
    }
  }

  // Also called if fork() failed. No process has the write end then, so read() returns at once.
  void in_parent() {
    done_write = FileDescriptor();
    char byte;
    while (done_read && read(done_read.get(), &byte, 1) < 0 && errno == EINTR) {
    }
    done_read = FileDescriptor();
    for (Arena* arena : arenas) {
      arena->keep_from_children();
      arena->mutex_.unlock();
    }
    mutex.unlock();
  }

  void in_child() {
    for (Arena* arena : arenas) arena->become_private();
    if (done_write) {
      char byte = 0;
      while (write(done_write.get(), &byte, 1) < 0 && errno == EINTR) {
      }
    }
    done_read = FileDescriptor();
    done_write = FileDescriptor();
    for (Arena* arena : arenas) arena->mutex_.unlock();
    mutex.unlock();
  }
};

void Arena::handle_forks(bool handle) {
  Forks& forks = Forks::process();
  std::lock_guard lock(forks.mutex);
  if (handle) {
    forks.arenas.push_back(this);
  } else {
    std::erase(forks.arenas, this);
  }
}

// Children do not inherit the segments (MADV_DONTFORK), except during a fork() that runs these
// handlers: the child needs the address ranges to stay reserved until it has put its copies there.
void Arena::plan_copies() {
  copies_.clear();
  if (inert_) return;
  for (auto& [base, segment] : segments_) {
    segment.all_copied = true;
    madvise(base, segment.bytes, MADV_DOFORK);
  }
  for (const auto& [address, block] : blocks_) {
    if (!block.free) copies_.emplace_back(block.bytes, address);
  }
  std::sort(copies_.begin(), copies_.end());
  size_t total = 0, count = 0;
  while (count < copies_.size() && copies_[count].first <= options_.fork_copy - total)
    total += copies_[count++].first;
  for (size_t i = count; i < copies_.size(); ++i)
    blocks_.at(copies_[i].second).segment->all_copied = false;
  copies_.resize(count);
}

void Arena::keep_from_children() {
  if (inert_) return;
  for (auto& [base, segment] : segments_) madvise(base, segment.bytes, MADV_DONTFORK);
  copies_.clear();
}

void Arena::become_private() {
  if (inert_) return;
  inert_ = true;
  bool all_mapped = true, all_copied = true;
  for (auto& [base, segment] : segments_) {
    int protection = segment.all_copied ? PROT_READ | PROT_WRITE : PROT_NONE;
    all_copied &= segment.all_copied;
    void* fresh = mmap(base, segment.bytes, protection,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (fresh == MAP_FAILED) {
      munmap(base, segment.bytes);  // no memory is better than the parent's memory
      all_mapped = false;
    }
  }
  for (auto [bytes, address] : copies_) {
    const Segment& segment = *blocks_.at(address).segment;
    auto offset = static_cast<size_t>(address - segment.base);
    if (!segment.all_copied) {
      size_t before = offset % kPage;
      mprotect(address - before, before + bytes, PROT_READ | PROT_WRITE);
    }
    // If the target could not be mapped or unprotected, pread() returns an error; it does not fault.
    if (copy_block(segment.fd.get(), offset, address, bytes)) continue;
    mprotect(address - offset % kPage, offset % kPage + bytes, PROT_NONE);
    all_mapped = false;
  }
  if (!all_mapped) {
    log(LogLevel::kError, "a forked child could not copy all shared memory of its parent");
  } else if (!all_copied) {
    log(LogLevel::kWarning,
        "a forked child has no copy of its parent's largest shared blocks and must not access "
        "them: at most 1 GiB is copied, the smallest blocks first; spawned children need no "
        "copies");
  }
  // The child closes the descriptors, so that the memory is freed when the parent ends, and does not
  // stay until its last child ends.
  for (auto& [base, segment] : segments_) segment.fd = FileDescriptor();
  table_ = Shared();
  free_.clear();
  copies_.clear();
  statistics_.kept = statistics_.segments = statistics_.reserved = statistics_.huge = 0;
}

}  // namespace smddp::intranode
