// For how long the ranks of this host that a group waits for have been stopped, as by SIGSTOP. A rank that
// computes is not stopped, however long it takes. Must not know how operations move their bytes, nor how a
// stopped process is recognised. The FailureDetector calls it, under the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "flows/local_peers.h"
#include "group/fragment_queue.h"
#include "topology/members.h"

namespace smddp {

class LocalWatch {
 public:
  // `silence_ns`: 0 for no limit.
  LocalWatch(const Members& members, LocalPeers& local, const FragmentQueue& fragments,
             uint64_t silence_ns)
      : members_(members), local_(local), fragments_(fragments), silence_ns_(silence_ns) {}

  // Not ok: a rank that is waited for has been stopped for too long. Cheap if called more often than
  // needed.
  Status look(uint64_t now);

 private:
  bool awaits(int i) const;

  const Members& members_;
  LocalPeers& local_;
  const FragmentQueue& fragments_;
  const uint64_t silence_ns_;
  uint64_t last_look_ns_ = 0;
  std::vector<uint64_t> stopped_ns_;  // by local peer; 0: it runs, or is not waited for
};

}  // namespace smddp
