#include "intranode/shared.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

namespace smddp::intranode {

std::string fd_path(int pid, int fd) {
  return "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
}

Mapping::Mapping(Mapping&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    if (address_ != nullptr) munmap(address_, size_);
    address_ = std::exchange(other.address_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

void* Mapping::release() { return std::exchange(address_, nullptr); }

Mapping::~Mapping() {
  if (address_ != nullptr) munmap(address_, size_);
}

Result<Shared> create_shared(const char* label, size_t size) {
  Shared shared;
  shared.fd = FileDescriptor(memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!shared.fd) return errno_status("could not create a shared segment (memfd_create)");
  if (fchmod(shared.fd.get(), 0600) != 0 ||
      ftruncate(shared.fd.get(), static_cast<off_t>(size)) != 0) {
    return errno_status("could not set the size of a shared segment to " + std::to_string(size) +
                        " bytes");
  }
  if (fcntl(shared.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return errno_status("could not seal a shared segment");
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, shared.fd.get(), 0);
  if (address == MAP_FAILED)
    return errno_status("could not map a shared segment of " + std::to_string(size) + " bytes");
  shared.mapping = Mapping(address, size);
  return shared;
}

Result<Mapping> map_shared(int pid, int fd, const std::string& what) {
  FileDescriptor opened(open(fd_path(pid, fd).c_str(), O_RDWR | O_CLOEXEC));
  if (!opened) {
    return errno_status(
        "could not open the shared segment of " + what + " (process " + std::to_string(pid) +
        "): it has ended or could not join, runs as another user or in another pid "
        "namespace, or is not dumpable (prctl, or file capabilities of its program); "
        "give ranks that can't share memory different SMDDP_HOST_ID");
  }
  // A segment that could shrink would end an access to it with SIGBUS.
  struct stat info;
  int seals = fcntl(opened.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(opened.get(), &info) != 0 ||
      info.st_size == 0) {
    return Status(Code::kUnavailable, "descriptor " + std::to_string(fd) + " of process " +
                                          std::to_string(pid) + " is not a shared segment of " +
                                          what + "; did a rank restart?");
  }
  auto size = static_cast<size_t>(info.st_size);
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, opened.get(), 0);
  if (address == MAP_FAILED) return errno_status("could not map the shared segment of " + what);
  return Mapping(address, size);
}

}  // namespace smddp::intranode
