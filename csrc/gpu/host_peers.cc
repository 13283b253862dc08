#include "gpu/host_peers.h"

#include <unistd.h>

#include <algorithm>

namespace smddp {

void HostPeers::join(const std::vector<int>& pids) {
  pids_ = pids;
  gone_since_ns_.assign(pids.size(), 0);
  alive_.resize(pids.size());
  for (size_t i = 0; i < pids.size(); ++i) {
    if (pids[i] != getpid()) alive_[i] = open_process(pids[i]);
  }
}

Status HostPeers::lost(uint64_t now, uint64_t started_ns, uint64_t grace_ns,
                       const std::string& what) {
  for (size_t i = 0; i < alive_.size(); ++i) {
    if (!has_ended(alive_[i])) continue;
    if (gone_since_ns_[i] == 0) gone_since_ns_[i] = now;
    if (now - std::max(gone_since_ns_[i], started_ns) < grace_ns) continue;
    return {Code::kPeerLost,
            names_[i] + " (process " + std::to_string(pids_[i]) + ") ended during " + what};
  }
  return {};
}

}  // namespace smddp
