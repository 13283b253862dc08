// Tries whether a rank's device can read the memory of its host's other ranks, before a group relies on it:
// it may not (GPUs without peer access, partitions of one GPU, ranks in separate IPC namespaces), and may
// deliver wrong bytes (an IOMMU between the GPUs). DeviceLinks runs it when a group is made.
#pragma once

#include <vector>

#include "common/mapping.h"
#include "gpu/host_peers.h"
#include "intranode/copy_engine_memory.h"

namespace smddp {

class PeerTrial {
 public:
  PeerTrial(device::Device& device, const HostPeers& peers, device::Stream main)
      : device_(device), peers_(peers), main_(main) {}
  ~PeerTrial();

  // What the ranks of the host send one another; of equal size on all ranks. Says also if this rank failed.
  std::vector<std::byte> offer();
  // Imports, copies and, if `sums`, sums what all ranks offer, and compares. `offers`: one after the other, by
  // local index. The peers may read this rank's memory until they have ended it too. Waits for the device.
  Status read(const std::vector<std::byte>& offers, bool sums);

 private:
  Status open();
  Status copies_and_sum(const std::vector<intranode::MemoryOffer>& offers,
                        intranode::Imports& imports, bool sums);
  Status compare(bool sums) const;
  size_t ranks() const { return static_cast<size_t>(peers_.count()); }
  // The own part, a copy of each rank's part, and the sum.
  size_t parts() const { return ranks() + 2; }

  device::Device& device_;
  const HostPeers& peers_;
  const device::Stream main_;
  std::byte* memory_ = nullptr;  // on the device
  Mapping host_;                 // pinned, of the same size
  std::byte* host_on_device_ = nullptr;
};

}  // namespace smddp
