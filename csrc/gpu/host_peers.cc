#include "gpu/host_peers.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace smddp {
namespace {

constexpr long kPidfdOpen = 434;  // SYS_pidfd_open, the same on all architectures

}  // namespace

void HostPeers::join(const std::vector<int>& pids) {
  pids_ = pids;
  gone_since_ns_.assign(pids.size(), 0);
  alive_.resize(pids.size());
  for (size_t i = 0; i < pids.size(); ++i) {
    if (pids[i] == getpid()) continue;
    alive_[i] = FileDescriptor(static_cast<int>(syscall(kPidfdOpen, pids[i], 0)));
  }
}

Status HostPeers::lost(uint64_t now, uint64_t started_ns, uint64_t grace_ns,
                       const std::string& what) {
  for (size_t i = 0; i < alive_.size(); ++i) {
    pollfd p{alive_[i].get(), POLLIN, 0};
    if (p.fd < 0 || poll(&p, 1, 0) != 1) continue;
    if (gone_since_ns_[i] == 0) gone_since_ns_[i] = now;
    if (now - std::max(gone_since_ns_[i], started_ns) < grace_ns) continue;
    return {Code::kPeerLost,
            names_[i] + " (process " + std::to_string(pids_[i]) + ") ended during " + what};
  }
  return {};
}

}  // namespace smddp
