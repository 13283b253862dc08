// Owns a file descriptor and closes it once. Used by every folder that opens one.
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace smddp {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = other.release();
    }
    return *this;
  }
  ~FileDescriptor() { close(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }  // the descriptor is the caller's now

 private:
  void close() {
    if (fd_ >= 0) ::close(fd_);
  }

  int fd_ = -1;
};

// Is readable once the process has ended. None before Linux 5.3.
inline FileDescriptor open_process(int pid) {
  constexpr long kPidfdOpen = 434;  // SYS_pidfd_open, which older C libraries do not define
  return FileDescriptor(static_cast<int>(syscall(kPidfdOpen, pid, 0)));
}

// Whether a process that open_process() has opened has ended, or ends within `ms`.
inline bool has_ended(const FileDescriptor& process, int ms = 0) {
  pollfd end{process.get(), POLLIN, 0};
  return process && poll(&end, 1, ms) == 1;
}

}  // namespace smddp
