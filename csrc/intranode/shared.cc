#include "intranode/shared.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <utility>

namespace smddp::intranode {
namespace {

Status failed(const std::string& what) {
  return {Code::kUnavailable, what + ": " + std::strerror(errno)};
}

}  // namespace

std::string fd_path(int pid, int fd) {
  return "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

int Fd::release() { return std::exchange(fd_, -1); }

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
  shared.fd = Fd(memfd_create(label, MFD_CLOEXEC));
  if (!shared.fd) return failed("could not create a shared segment (memfd_create)");
  if (fchmod(shared.fd.get(), 0600) != 0 ||
      ftruncate(shared.fd.get(), static_cast<off_t>(size)) != 0) {
    return failed("could not size a shared segment of " + std::to_string(size) + " bytes");
  }
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, shared.fd.get(), 0);
  if (address == MAP_FAILED)
    return failed("could not map a shared segment of " + std::to_string(size) + " bytes");
  shared.mapping = Mapping(address, size);
  return shared;
}

Result<Mapping> map_shared(int pid, int fd, const std::string& what) {
  Fd opened(open(fd_path(pid, fd).c_str(), O_RDWR | O_CLOEXEC));
  if (!opened) {
    return failed(
        "could not open the shared segment of " + what + " (process " + std::to_string(pid) +
        "): it ended or could not join, or lives under another user or in another pid namespace; "
        "give ranks that can't share memory different SMDDP_HOST_ID");
  }
  struct stat info;
  if (fstat(opened.get(), &info) != 0 || info.st_size == 0)
    return failed("could not read the size of the segment of " + what);
  auto size = static_cast<size_t>(info.st_size);
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, opened.get(), 0);
  if (address == MAP_FAILED) return failed("could not map the shared segment of " + what);
  return Mapping(address, size);
}

}  // namespace smddp::intranode
