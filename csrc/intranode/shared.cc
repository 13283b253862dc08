#include "intranode/shared.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace smddp::intranode {
namespace {

constexpr int kEndingMs = 200;

}  // namespace

std::string fd_path(int pid, int fd) {
  return "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
}

bool holds(int fd, uint64_t bytes, struct stat* info) {
  int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(fd, info) == 0 &&
         static_cast<uint64_t>(info->st_size) >= bytes;
}

Result<Shared> create_shared(const char* label, size_t size, unsigned flags) {
  Shared shared;
  shared.fd = FileDescriptor(memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!shared.fd) return errno_status("could not create a shared segment (memfd_create)");
  if (fchmod(shared.fd.get(), 0600) != 0 ||
      ftruncate(shared.fd.get(), static_cast<off_t>(size)) != 0) {
    return errno_status("could not set the size of a shared segment to " + std::to_string(size) +
                        " bytes");
  }
  if (fcntl(shared.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return errno_status("could not seal a shared segment");
  if (Status s = Mapping::map(size, MAP_SHARED, shared.fd.get()).into(shared.mapping); !s) return s;
  return shared;
}

Status could_not_open(const std::string& failure, int pid) {
  const int why = errno;
  FileDescriptor process = open_process(pid);
  const bool no_process = !process && errno == ESRCH;
  // A process closes its descriptors just before its end can be seen.
  if (no_process || has_ended(process, why == ENOENT ? kEndingMs : 0)) {
    return {Code::kPeerLost, "process " + std::to_string(pid) +
                                 " has ended (or runs in another pid namespace, and needs another "
                                 "SMDDP_HOST_ID)"};
  }
  std::string text = failure + " (process " + std::to_string(pid) + ")";
  if (why != EMFILE && why != ENFILE) {  // not for want of descriptors
    text +=
        ": it has ended or could not join, runs as another user or in another pid "
        "namespace, or is not dumpable (prctl, or file capabilities of its program); "
        "give ranks that can't share memory different SMDDP_HOST_ID";
  }
  errno = why;
  return errno_status(text);
}

Result<Mapping> map_shared(int pid, int fd, const std::string& what) {
  FileDescriptor opened(open(fd_path(pid, fd).c_str(), O_RDWR | O_CLOEXEC));
  if (!opened) return could_not_open("could not open the shared segment of " + what, pid);
  struct stat info;
  if (!holds(opened.get(), 1, &info)) {
    return Status(Code::kUnavailable, "descriptor " + std::to_string(fd) + " of process " +
                                          std::to_string(pid) + " is not a shared segment of " +
                                          what + "; did a rank restart?");
  }
  return Mapping::map(static_cast<size_t>(info.st_size), MAP_SHARED, opened.get());
}

}  // namespace smddp::intranode
