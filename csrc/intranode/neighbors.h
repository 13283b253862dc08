// The neighbours of a process: the processes of its groups on this host. Each is opened once for all
// groups that contain it. Knows no group. Called by the engine, under its lock.
#pragma once

#include <poll.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "common/status.h"
#include "intranode/presence.h"

namespace smddp::intranode {

class Neighbors {
 public:
  // As Neighbor::open(). If another group has this neighbour open, returns that object.
  Result<std::shared_ptr<Neighbor>> open(int pid, uint64_t token, int presence_fd, int wake_fd);
  // Marks the neighbours that have ended as dead, with one poll() for all of them. Appends, for the
  // others, the descriptors that become readable when a neighbour ends.
  void watch_deaths(std::vector<pollfd>& fds);
  // Whether one of them polls on this core.
  bool any_polls_on(int core) const;

 private:
  std::map<uint64_t, std::weak_ptr<Neighbor>> by_token_;
};

}  // namespace smddp::intranode
