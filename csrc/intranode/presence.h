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
#include "intranode/peer_memory.h"
#include "intranode/shared.h"

namespace smddp::intranode {

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
  FileDescriptor bell_read_, bell_write_;
};

class Neighbor {
 public:
  static Result<std::unique_ptr<Neighbor>> open(int pid, uint64_t token, int presence_fd,
                                                int doorbell_fd);

  int pid() const { return pid_; }
  // Where memory of the neighbour's arena lies in this process (see PeerMemory::find()); nullptr where
  // it is none. Opens the arena's table on first use.
  std::byte* find(const std::byte* owner_address, size_t bytes);
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
  FileDescriptor doorbell_;
  FileDescriptor pidfd_;
  bool looked_for_memory_ = false;
  std::unique_ptr<PeerMemory> memory_;
};

}  // namespace smddp::intranode
