// How the ranks of a host tell one another where an operation's memory lies, so that each can read it. DeviceGroup
// begins it with the operation and launches that once it is over.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/operation.h"
#include "gpu/host_peers.h"
#include "intranode/copy_engine_memory.h"

namespace smddp {

class DeviceOperation;

// An AllGather on the CPU of what each rank offers the others, a part of the operation that it is made of.
class OfferExchange final : public Operation {
 public:
  explicit OfferExchange(DeviceOperation& of) : of_(of) {}
  void offer(device::Device& device, const HostPeers& peers);
  std::byte* mine() { return mine_.data(); }
  // Once it is complete: when the last rank of the host called.
  uint64_t last_call(const HostPeers& peers) const {
    return intranode::MemoryOffer::last_call(all_.data(), mine_.size(), peers.count());
  }
  // Once it is complete. An error if a rank called another collective, or refuses: the same refusal on all ranks is kInvalid.
  Result<std::vector<intranode::MemoryOffer>> offers(const HostPeers& peers) const;
  void drop() { mine_ = all_ = {}; }

 private:
  void on_complete() override;

  DeviceOperation& of_;
  std::vector<std::byte> mine_, all_;
};

}  // namespace smddp
