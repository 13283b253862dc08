// What each rank does in a collective on device memory, as a function of sizes, hosts and settings: which
// parts the ranks of a host read from one another, and which parts go through pinned memory. Pure arithmetic:
// it calls no device. Called by the torch module.
//
// Between hosts with equally many ranks, as on the CPU (docs/dev/gpu.md), data leaves a host along the rails, to
// the rank with the same local index on each other host. An AllGather first gathers along the rail, then
// inside the host. A ReduceScatter first sums inside the host, then along the rail. An AllReduce sums its part
// inside the host, then along the rail, and gathers inside the host. If each host has one rank, the ranks exchange
// their blocks and each device sums its own; an AllReduce then gathers the sums. If hosts have unequal numbers of
// ranks, if the CPU does the sums, or if partial sums travel in fp32, everything goes through pinned memory, among
// all ranks.
#pragma once

#include <functional>
#include <vector>

#include "gpu/device_group.h"

namespace smddp {

struct DevicePlace {
  const Topology& topology;
  Rank rank;
  bool sums_on_cpu = false;
  bool by_nic = false;   // as the group says
  bool kernels = false;  // as the group says
  Tuning tuning;

  // Of this rank's host.
  int nodes() const { return topology.nodes(); }
  int node() const { return topology.node_of(rank); }
  int index() const { return topology.local_index(rank); }
  int ranks() const { return static_cast<int>(topology.node(node()).size()); }
  // The rank with local index `index` on `node`.
  size_t at(int node, int index) const {
    return static_cast<size_t>(topology.node(node)[static_cast<size_t>(index)]);
  }
};

enum class DeviceWay { kHost, kRails, kAll };
DeviceWay device_way(const DevicePlace& place, bool sums);
// Whether the device sums what comes from other hosts: each host has one rank, kernels exist, and one can sum so
// many blocks at once, so that nothing is rounded before the last.
bool device_sums_hosts(const DevicePlace& place);
// The path's name in the statistics.
const char* name_of_way(const DevicePlace& place, bool sums);

// A part of what this rank offers its peers: [offset, offset + bytes) of an extent; the part lies at
// `address`.
struct DevicePart {
  size_t extent, offset, bytes;
  std::byte* address;
};

// Fill the operation's plan, exchange and offered extents. Its `what` must already say which collective it is,
// and its `plan` how sums are made.
//
// `inputs`: one per tensor. `blocks`: tensor by tensor, one per rank.
void plan_gather(DeviceOperation& op, const DevicePlace& place, const std::vector<Extent>& inputs,
                 const std::vector<Extent>& blocks);
// `blocks`: tensor by tensor, one per rank, of the extents `whole`. `temporary`: memory on the device that
// lives as long as the operation.
void plan_scatter(DeviceOperation& op, const DevicePlace& place, std::vector<Extent> whole,
                  const std::vector<DevicePart>& blocks, const std::vector<Extent>& outputs,
                  const std::function<std::byte*(size_t)>& temporary);
void plan_reduce(DeviceOperation& op, const DevicePlace& place, const std::vector<Extent>& tensors);

}  // namespace smddp
