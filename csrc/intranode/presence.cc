#include "intranode/presence.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "intranode/arena.h"

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

Result<std::unique_ptr<Presence>> Presence::create() {
  auto presence = std::make_unique<Presence>();
  auto shared = create_shared("smddp-presence", 4096);
  if (!shared) return shared.status();
  presence->shared_ = std::move(shared.value());
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return failed("could not create the doorbell pipe");
  presence->bell_read_ = Fd(ends[0]);
  presence->bell_write_ = Fd(ends[1]);
  uint64_t token = 0;
  if (getrandom(&token, sizeof token, 0) != sizeof token)
    return failed("could not draw a random token");
  presence->page()->token = token;
  presence->page()->arena_fd = Arena::process().table_fd();
  // Yama's ptrace_scope 1 lets only descendants read a process's memory unless it says otherwise.
  // Where the kernel has no Yama the call fails, and nothing was forbidden.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  return presence;
}

void Presence::announce_sleep() {
  page()->sleeping.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Presence::announce_awake() { page()->sleeping.store(0, std::memory_order_relaxed); }

void Presence::ring_self() {
  char byte = 0;
  // A full pipe is as good as a ring.
  [[maybe_unused]] ssize_t n = write(bell_write_.get(), &byte, 1);
}

void Presence::drain() {
  char bytes[64];
  while (read(bell_read_.get(), bytes, sizeof bytes) == static_cast<ssize_t>(sizeof bytes)) {
  }
}

Result<std::unique_ptr<Neighbor>> Neighbor::open(int pid, uint64_t token, int presence_fd,
                                                 int doorbell_fd) {
  auto neighbor = std::make_unique<Neighbor>();
  neighbor->pid_ = pid;
  std::string what = "a rank on this host";
  auto mapping = map_shared(pid, presence_fd, what);
  if (!mapping) return mapping.status();
  neighbor->mapping_ = std::move(mapping.value());
  if (neighbor->page()->token != token) {
    return Status(Code::kUnavailable,
                  "process " + std::to_string(pid) +
                      " is not the rank that announced it: it ended, or lives in another pid "
                      "namespace; give such ranks different SMDDP_HOST_ID");
  }
  // O_RDWR: with itself as a reader, a write never meets a pipe without one, so no SIGPIPE when the
  // neighbour dies.
  neighbor->doorbell_ =
      Fd(::open(fd_path(pid, doorbell_fd).c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!neighbor->doorbell_) return failed("could not open the doorbell of " + what);
  if (pid != getpid()) {
    neighbor->pidfd_ =
        Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));  // kernel >= 5.3, else -1
  }
  return neighbor;
}

void Neighbor::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (page()->sleeping.load(std::memory_order_relaxed) == 0) return;
  if (page()->sleeping.exchange(0, std::memory_order_relaxed) == 0) return;  // somebody else rings
  char byte = 0;
  [[maybe_unused]] ssize_t n = write(doorbell_.get(), &byte, 1);
}

bool Neighbor::look_for_death() {
  if (dead_ || !pidfd_) return dead_;
  pollfd p{pidfd_.get(), POLLIN, 0};
  dead_ = poll(&p, 1, 0) == 1;
  return dead_;
}

}  // namespace smddp::intranode
