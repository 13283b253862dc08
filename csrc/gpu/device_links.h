// What a device group of this rank is connected to: the processes of its host, their flags, and the CPU's
// groups that carry data between hosts. Opened by a call of all ranks. DeviceGroup owns it and locks.
#pragma once

#include <memory>
#include <vector>

#include "gpu/device_operation.h"
#include "gpu/host_peers.h"
#include "gpu/pinned_pipeline.h"
#include "group/group.h"
#include "intranode/copy_engine.h"

namespace smddp {

// The pipelines of a device group: one among the ranks of this rank's rail, one among all ranks, each
// opened where it is needed. Used by DeviceGroup alone, which locks: a pipeline is added and taken away
// under both of the group's locks, and used under either.
struct PipelineSet {
  std::unique_ptr<PinnedPipeline> all, rail;  // the rail's goes first

  // The one that carries the operation's exchanges; nullptr if it has none, or if that is not open.
  PinnedPipeline* of(const DeviceOperation& op) const {
    return op.exchanges.empty() ? nullptr : op.among_all ? all.get() : rail.get();
  }
  // Makes room for the operation's exchanges.
  Status reserve(const DeviceOperation& op) const;
  Status status() const;  // of the first that is broken
  std::vector<PinnedPipeline*> open() const;
};

class DeviceLinks {
 public:
  // A call of all ranks of `cpu_group`, whose store `store` is. `usable`: whether this rank has a device. If
  // one rank has none, or cannot read its peers' memory, all ranks get an error that names that rank. Devices
  // sum it only if `sums`.
  static Result<std::unique_ptr<DeviceLinks>> open(Process& process, Group& cpu_group, Store& store,
                                                   const Status& usable, device::Device* device,
                                                   intranode::Imports* imports, device::Stream main,
                                                   uint64_t limit_ns, bool sums);
  // A pipeline among all ranks; a call of all ranks.
  Result<std::unique_ptr<PinnedPipeline>> open_for_all(Group& cpu_group, Store& store,
                                                       uint64_t limit_ns);

  // Its number for CopyEngine::call(); the group's operations follow.
  static constexpr uint32_t kTrialCall = 1;
  // A turn for the operation of this number, which this rank calls next.
  uint64_t enter_order(uint32_t number) const;

  // Not ok: why a peer has given up; in status(), or why a pipeline is broken.
  Status peers_gave_up() const;
  Status status() const;

  const Topology topology;      // of all ranks
  intranode::Imports& imports;  // of the device
  HostPeers peers;
  std::unique_ptr<intranode::CopyEngine> copy_engine;
  std::unique_ptr<Group> own_group;  // of this host's ranks, if it is a part of the whole one
  Group* host_group;                 // of this host's ranks
  PipelineSet pipelines;
  // Equal on all ranks: whether NICs read and write each rank's device's memory, and whether each device has
  // kernels.
  bool by_nic = false, kernels = false;

 private:
  DeviceLinks(Process& process, Group& cpu_group, device::Device& device,
              intranode::Imports& imports);
  Status open_hosts(Group& cpu_group, Store& store, uint64_t limit_ns);
  Status join_host(device::Stream main, uint64_t limit_ns, bool sums, Status usable);
  Status try_peers(device::Stream main, uint64_t limit_ns, bool sums);
  // Of CPU collectives among `ranks` of `cpu_group`.
  Result<std::unique_ptr<PinnedPipeline>> open_pipeline(Group& cpu_group, Store& store,
                                                        const std::string& label,
                                                        const std::vector<Rank>& ranks,
                                                        uint64_t limit_ns, bool nics);

  Process& process_;
  device::Device& device_;
  const uint64_t group_number_;  // for the order of submission
};

// The first error of all ranks of `group`, the same on all of them: a call of all.
Status agree(Engine& engine, Group& group, const Status& mine);

}  // namespace smddp
