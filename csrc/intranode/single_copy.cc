// Reads of another process's memory, by process_vm_readv() over lists of extents. Declared in outbox.h.
#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "intranode/outbox.h"

namespace smddp::intranode {
namespace {

constexpr int kRuns = 64;

// Fills `runs` with up to kRuns runs of the extents, from byte `offset` on, `limit` bytes at most.
// Returns the number of bytes that the runs cover.
size_t fill(const Extent* extents, size_t count, size_t offset, size_t limit, iovec* runs,
            int* used) {
  size_t covered = 0;
  *used = 0;
  for (size_t i = 0; i < count && covered < limit && *used < kRuns; ++i) {
    const Extent extent = extents[i];  // may lie in memory that another process writes
    if (offset >= extent.bytes) {
      offset -= extent.bytes;
      continue;
    }
    size_t bytes = std::min(extent.bytes - offset, limit - covered);
    runs[(*used)++] = {extent.address + offset, bytes};
    covered += bytes;
    offset = 0;
  }
  return covered;
}

}  // namespace

Status single_copy_read(int pid, const Extent* from, size_t from_count, size_t offset, size_t bytes,
                        const Extent* to, size_t to_count) {
  size_t done = 0;
  while (done < bytes) {
    iovec remote[kRuns], local[kRuns];
    int remotes = 0, locals = 0;
    size_t n = fill(to, to_count, done, bytes - done, local, &locals);
    n = fill(from, from_count, offset + done, n, remote, &remotes);
    fill(to, to_count, done, n, local, &locals);
    if (n == 0)
      return {Code::kInternal, "the extents of a piece have fewer bytes than the piece says"};
    ssize_t got = process_vm_readv(pid, local, static_cast<unsigned long>(locals), remote,
                                   static_cast<unsigned long>(remotes), 0);
    if (got <= 0) {
      Code code = errno == ESRCH ? Code::kPeerLost : Code::kUnavailable;
      return {code, "could not read the memory of process " + std::to_string(pid) + ": " +
                        std::strerror(errno)};
    }
    done += static_cast<size_t>(got);
  }
  return {};
}

}  // namespace smddp::intranode
