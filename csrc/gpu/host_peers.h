// The processes of a device group on this host: what they are called, and which of them have ended. Used
// by DeviceGroup alone; knows no device.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/file_descriptor.h"
#include "common/status.h"

namespace smddp {

class HostPeers {
 public:
  // `names`: of this host's ranks, by local index; `own` is this rank's.
  HostPeers(std::vector<std::string> names, int own) : names_(std::move(names)), own_(own) {}

  // The process ids of all ranks of the host, by local index. From now on their ends are noticed.
  void join(const std::vector<int>& pids);

  int count() const { return static_cast<int>(names_.size()); }
  int own() const { return own_; }
  const std::string& name(int index) const { return names_[static_cast<size_t>(index)]; }

  // An error that names a peer whose process has ended, once that was noticed, and the operation was
  // started, at least `grace_ns` ago; kOk without one. `what`: the operation, for the sentence.
  Status lost(uint64_t now_ns, uint64_t started_ns, uint64_t grace_ns, const std::string& what);

 private:
  std::vector<std::string> names_;
  const int own_;
  std::vector<int> pids_;
  std::vector<FileDescriptor> alive_;  // a pidfd per peer: readable once the process has ended
  std::vector<uint64_t> gone_since_ns_;
};

}  // namespace smddp
