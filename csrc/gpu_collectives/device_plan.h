// Who does what in a collective on device memory, as a function of sizes, hosts and settings: which
// parts the ranks of a host read from one another, and which go through pinned memory.
//
// Over several hosts with as many ranks each, as on the CPU (docs/gpu.md): what leaves a host goes along
// the rails, to the rank of the same local index on each other host. An AllGather first gathers along
// the rail, then inside the host; a ReduceScatter first sums inside the host, then along the rail; an
// AllReduce sums its part inside the host, then along the rail, and gathers inside the host. Where hosts
// are unequal, where the CPU does the sums, and where partial sums have to travel in fp32, everything
// goes through pinned memory, among all ranks.
#pragma once

#include <functional>
#include <vector>

#include "gpu_collectives/device_group.h"

namespace smddp {

struct DevicePlace {
  const Topology& topology;
  Rank rank;
  bool sums_on_cpu = false;
  bool by_nic = false;  // the group's
  Tuning tuning;
};

enum class DeviceWay { kHost, kRails, kAll };
DeviceWay device_way(const DevicePlace& place, bool sums);
// For the statistics.
const char* name_of_way(const DevicePlace& place, bool sums);

// Of what this rank offers: [offset, offset + bytes) of an extent, which lies at `address`.
struct DevicePart {
  size_t extent, offset, bytes;
  std::byte* address;
};

// Fill the operation's plan, exchange and offered extents; its `what` says what it is already, and
// `plan` how sums are made.
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
