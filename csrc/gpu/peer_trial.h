// Tries what a group's operations rely on, before they do: flags that streams and the CPU set for one another,
// events, and one operation of the copy engine with all ranks of the host. A driver may refuse them (flags in
// batches, peer access, IPC between namespaces, partitions of one GPU) or do them wrongly (an IOMMU between the
// GPUs). DeviceLinks runs it when a group is made.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/mapping.h"
#include "gpu/host_peers.h"
#include "intranode/copy_engine.h"

namespace smddp {

class PeerTrial {
 public:
  // Nothing is waited for longer than `limit_ns`.
  PeerTrial(device::Device& device, const HostPeers& peers, device::Stream main,
            intranode::CopyEngine& engine, uint64_t limit_ns)
      : device_(device), peers_(peers), main_(main), engine_(engine), limit_ns_(limit_ns) {}
  ~PeerTrial();

  // Tries this rank's device alone. What the ranks of the host send one another; of equal size on all ranks. Says
  // also if this rank failed. `turn`: of the operation with the peers, whose number for CopyEngine::call() is
  // `number`.
  std::vector<std::byte> offer(uint64_t turn, uint32_t number);
  // Imports what all ranks offer, copies and, if `sums`, sums it by an operation of the engine, and compares.
  // `offers`: one after the other, by local index. The peers may read this rank's memory until they have ended it
  // too. Ok also where only a peer has failed; the engine is then used up.
  Status carry_out(const std::vector<std::byte>& offers, bool sums);
  // A stream has work that nothing has ended. What that work uses must never be freed.
  bool stuck() const { return stuck_; }

 private:
  Status open();
  Status try_flags();
  Status submit(const std::vector<std::byte>& offers, intranode::Imports& imports, bool sums);
  Status import_all(const std::vector<intranode::MemoryOffer>& offers,
                    intranode::Imports& imports) const;
  Status compare(bool sums) const;
  template <class Condition>
  bool soon(Condition&& condition) const;
  template <class Each>
  Status drain(Each&& each);
  size_t ranks() const { return static_cast<size_t>(peers_.count()); }
  // The own part, a copy of each rank's part, and the sum.
  size_t parts() const { return ranks() + 2; }
  // What the stream `main` has set last.
  uint32_t word() const;
  uint32_t* word_on_device() const;

  device::Device& device_;
  const HostPeers& peers_;
  const device::Stream main_;
  intranode::CopyEngine& engine_;
  const uint64_t limit_ns_;
  std::byte* memory_ = nullptr;  // on the device
  Mapping host_;                 // pinned: of the same size, and the word
  std::byte* host_on_device_ = nullptr;
  std::unique_ptr<device::HostFlags> flags_;
  device::Event end_ = nullptr;
  uint64_t turn_ = 0;
  bool stuck_ = false;
};

}  // namespace smddp
