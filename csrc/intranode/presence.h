// A process as its neighbours on the host see it: a word that says whether it sleeps, a doorbell
// that wakes it, and a handle that tells when it dies.
//
// All of it lives in anonymous kernel objects (memfd, pipe) that neighbours open through
// /proc/<pid>/fd: nothing has a name in /dev/shm, so nothing can be left there, however a rank
// ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "common/status.h"

namespace smddp::intranode {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();

 private:
  int fd_ = -1;
};

// Owns a shared mapping of a memfd.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* address, size_t size) : address_(address), size_(size) {}
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  void* address() const { return address_; }
  size_t size() const { return size_; }
  void* release();  // the mapping is the caller's now

 private:
  void* address_ = nullptr;
  size_t size_ = 0;
};

struct Shared {
  Fd fd;
  Mapping mapping;
};

// A zeroed anonymous shared segment, mode 0600.
Result<Shared> create_shared(const char* label, size_t size);
// Maps another process's segment. `what` and `pid` are for the error's sentence.
Result<Mapping> map_shared(int pid, int fd, const std::string& what);

// Where another process's descriptor can be opened.
std::string fd_path(int pid, int fd);

struct PresencePage {
  uint64_t token;                  // written once before the page is announced
  std::atomic<uint32_t> sleeping;  // 1: ring the doorbell after you publish
  int32_t arena_fd;                // the arena's table, or -1; written once, like the token
};

class Presence {
 public:
  static Result<std::unique_ptr<Presence>> create();

  uint64_t token() const { return page()->token; }
  int presence_fd() const { return shared_.fd.get(); }
  int doorbell_fd() const { return bell_write_.get(); }
  int wait_fd() const { return bell_read_.get(); }

  // Announces sleep. The caller must look for work once more after this and before it blocks: the
  // sequentially consistent fence here pairs with the one in Neighbor::wake(), so either the
  // publisher sees `sleeping`, or this thread sees what was published.
  void announce_sleep();
  void announce_awake();
  // Wakes this process's own driver.
  void ring_self();
  // Empties the doorbell.
  void drain();

 private:
  PresencePage* page() const { return static_cast<PresencePage*>(shared_.mapping.address()); }
  Shared shared_;
  Fd bell_read_, bell_write_;
};

class Neighbor {
 public:
  static Result<std::unique_ptr<Neighbor>> open(int pid, uint64_t token, int presence_fd,
                                                int doorbell_fd);

  int pid() const { return pid_; }
  // For PeerMemory::open(): the table of the memory that the neighbour shares, or -1.
  int arena_fd() const { return page()->arena_fd; }
  // Rings if the neighbour sleeps. Call after publishing.
  void wake();
  // Readable once the process is gone; -1 for a neighbour inside this process.
  int death_fd() const { return pidfd_.get(); }
  // Looks at death_fd() without blocking. What the neighbour published before it died can be seen
  // once this has said true.
  bool look_for_death();
  // For whoever saw death_fd() readable among others.
  void mark_dead() { dead_ = true; }
  bool dead() const { return dead_; }  // what was last seen

 private:
  PresencePage* page() const { return static_cast<PresencePage*>(mapping_.address()); }
  int pid_ = 0;
  bool dead_ = false;
  Mapping mapping_;
  Fd doorbell_;
  Fd pidfd_;
};

}  // namespace smddp::intranode
