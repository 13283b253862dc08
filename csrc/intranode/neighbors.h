// The neighbors of a process, each opened once for all groups that contain it. Knows no group. Called by
// the engine, under its lock.
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
  // As Neighbor::open(), or the one that another group still has open.
  Result<std::shared_ptr<Neighbor>> open(int pid, uint64_t token, int presence_fd, int doorbell_fd);
  // Marks those dead that have ended, with one look at all of them, however many share the host. For the
  // others, appends the descriptors that become readable when one ends.
  void watch_deaths(std::vector<pollfd>& fds);

 private:
  std::map<uint64_t, std::weak_ptr<Neighbor>> by_token_;
};

}  // namespace smddp::intranode
