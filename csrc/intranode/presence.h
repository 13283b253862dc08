// What a process shows to its neighbours, which are the other processes of its groups on this host: a
// word that says whether it sleeps, a notification pipe that wakes it, and a handle that tells when it has ended.
// Presence is the process's own side, Neighbor the view of another process. The file knows no group and
// no operation. The engine makes the Presence; groups and the engine call neighbours.
//
// All of it lies in anonymous kernel objects (memfd, pipe) that neighbours open through
// /proc/<pid>/fd. Nothing has a name in /dev/shm, so nothing can stay there, in whatever way a rank
// ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "common/status.h"
#include "intranode/peer_memory.h"
#include "intranode/shared.h"

namespace smddp::intranode {

struct PresencePage {
  uint64_t token;                  // written once, before the page is announced
  std::atomic<uint32_t> sleeping;  // 1: notify it after publishing
  int32_t arena_fd;                // Arena::table_fd(), or -1; written once, like the token
  std::atomic<int32_t> core;       // on which its thread that drives last polled
};

class Presence {
 public:
  static Result<std::unique_ptr<Presence>> create();

  uint64_t token() const { return page()->token; }
  int presence_fd() const { return shared_.fd.get(); }
  int wake_fd() const { return wake_write_.get(); }
  int wait_fd() const { return wake_read_.get(); }

  // Announces sleep. The caller must look for work once more after this call and before it blocks. The
  // sequentially consistent fence here pairs with the one in Neighbor::wake(), so either the publisher
  // sees `sleeping`, or this thread sees the published data.
  void announce_sleep();
  void announce_awake();
  void announce_core(int core) { page()->core.store(core, std::memory_order_relaxed); }
  // Wakes the thread of this process that drives the engine.
  void notify_self();
  // Empties the notification pipe.
  void drain();

 private:
  PresencePage* page() const { return reinterpret_cast<PresencePage*>(shared_.mapping.data()); }
  Shared shared_;
  FileDescriptor wake_read_, wake_write_;
};

class Neighbor {
 public:
  static Result<std::unique_ptr<Neighbor>> open(int pid, uint64_t token, int presence_fd,
                                                int wake_fd);

  int pid() const { return pid_; }
  // The address in this process of memory of the neighbour's arena (see PeerMemory::find()); nullptr if
  // it is not memory of that arena. Opens the arena's table on first use.
  std::byte* find(const std::byte* owner_address, size_t bytes);
  // Notifies the neighbour if it sleeps. To be called after publishing.
  void wake();
  // Becomes readable when the process has ended. -1 if the neighbour is this process, or if the kernel is
  // older than 5.3.
  int death_fd() const { return pidfd_.get(); }
  // Polls death_fd() without blocking. Once this has returned true, everything that the neighbour
  // published before it died can be seen.
  bool look_for_death();
  // Called by the caller of poll() that saw death_fd() readable.
  void mark_dead() { dead_ = true; }
  bool dead() const { return dead_; }  // as last seen
  // Whether it polls on this core, as last announced.
  bool polls_on(int core) const;
  // Whether the process is stopped now, as by SIGSTOP. Reads /proc. False if that can't be read.
  bool is_stopped() const;

 private:
  PresencePage* page() const { return reinterpret_cast<PresencePage*>(mapping_.data()); }
  int pid_ = 0;
  bool dead_ = false;
  Mapping mapping_;
  FileDescriptor notification_;
  FileDescriptor pidfd_;
  bool looked_for_memory_ = false;
  std::unique_ptr<PeerMemory> memory_;
};

}  // namespace smddp::intranode
