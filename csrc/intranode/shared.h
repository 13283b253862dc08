// Anonymous segments, through which processes share memory. Knows nothing of the contents.
// Called by the other files of this folder.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>

#include "common/file_descriptor.h"
#include "common/mapping.h"

namespace smddp::intranode {

struct Shared {
  FileDescriptor fd;
  Mapping mapping;
};

// A zeroed anonymous shared segment, mode 0600, whose size no process can change. `flags`: more of memfd_create().
Result<Shared> create_shared(const char* label, size_t size, unsigned flags = 0);
// Maps the segment that is descriptor `fd` of process `pid`; an error if it is not one of create_shared(). `what` names
// the segment's owner in error texts.
Result<Mapping> map_shared(int pid, int fd, const std::string& what);

// Why something of process `pid` could not be opened, with errno as it is. kPeerLost: the process has ended.
Status could_not_open(const std::string& failure, int pid);

// True if the file has at least `bytes` bytes and no process can shrink it: accesses to its pages then
// never end in SIGBUS.
bool holds(int fd, uint64_t bytes, struct stat* info);

// The path through which descriptor `fd` of process `pid` can be opened.
std::string fd_path(int pid, int fd);

}  // namespace smddp::intranode
