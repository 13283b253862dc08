#include "intranode/shared.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "common/errno_status.h"

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
  shared.fd = FileDescriptor(memfd_create(label, MFD_CLOEXEC));
  if (!shared.fd) return errno_status("could not create a shared segment (memfd_create)");
  if (fchmod(shared.fd.get(), 0600) != 0 ||
      ftruncate(shared.fd.get(), static_cast<off_t>(size)) != 0) {
    return errno_status("could not set the size of a shared segment to " + std::to_string(size) +
                        " bytes");
  }
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
        "): it has ended or could not join, or runs as another user or in another pid namespace; "
        "give ranks that can't share memory different SMDDP_HOST_ID");
  }
  struct stat info;
  if (fstat(opened.get(), &info) != 0 || info.st_size == 0)
    return errno_status("could not read the size of the segment of " + what);
  auto size = static_cast<size_t>(info.st_size);
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, opened.get(), 0);
  if (address == MAP_FAILED) return errno_status("could not map the shared segment of " + what);
  return Mapping(address, size);
}

}  // namespace smddp::intranode
