// A group's collectives on device memory.
//
// A call returns once this rank has sent its peers of the host, by an AllGather on the CPU, where its
// memory lies. When all of them have done so, and only then, the whole operation is submitted to the
// device: so no rank's stream waits for something that a process of this host has yet to submit.
// Operations are submitted in the order of the calls, by the thread that receives the last message or,
// if there is a pipeline, by the thread that watches: threads that drive the network never call the
// device. Waiting for an operation makes a stream wait. The host waits only until the operation is
// submitted, that is until its peers of the host have made the call.
//
// The torch module makes it and calls it. It knows the device only by device/device.h.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu_collectives/device_operation.h"
#include "gpu_collectives/host_peers.h"
#include "gpu_collectives/pipeline_set.h"
#include "group/group.h"
#include "intranode/copy_engine.h"

namespace smddp {

class DeviceGroup : public std::enable_shared_from_this<DeviceGroup> {
 public:
  // A call of all ranks of `cpu_group`, whose store `store` is. `usable`: whether this rank has a
  // device; if one rank has none, no rank gets a group, and the status names that rank. Device, imports
  // and `main` must outlive the group. Only the group may use the stream `main`.
  static Result<std::shared_ptr<DeviceGroup>> create(Engine& engine, Group& cpu_group, Store& store,
                                                     Status usable, device::Device* device,
                                                     intranode::Imports* imports,
                                                     device::Stream main, uint64_t limit_ns);
  ~DeviceGroup();

  // Starts the operation, after all that the stream `callers` holds.
  Status submit(const std::shared_ptr<DeviceOperation>& operation, device::Stream callers);
  // Work submitted to `stream` from now on waits for the operation. The host waits until the operation is
  // submitted, for at most `timeout` (zero: no limit); kTimeout after that.
  Status order(DeviceOperation& operation, device::Stream stream, std::chrono::nanoseconds timeout);
  // Not ok: the operation's results must not be used. As far as is known now.
  Status verdict(const DeviceOperation& operation);
  // Whether the device is done with it.
  bool finished(const DeviceOperation& operation);

  // Before the first operation with `among_all`; a call of all ranks.
  Status open_for_all(Group& cpu_group, Store& store);

  Status status();
  void set_limit(uint64_t limit_ns);
  // Fails all operations under way, here and on the peers.
  void abort(const std::string& reason);
  // To be called before the CPU's group is destroyed. Waits for what was submitted to the device.
  void leave();

  // The operation calls it once the ranks of the host have told one another where their memory lies.
  void exchanged(DeviceOperation& operation);

  device::Device& device() { return device_; }
  const Topology& topology() const { return topology_; }  // of all ranks
  // True if NICs read and write this device's memory in an AllGather along the rails.
  bool by_nic() const { return by_nic_; }

 private:
  DeviceGroup(Engine& engine, Group& cpu_group, device::Device& device, intranode::Imports& imports,
              device::Stream main, uint64_t limit_ns);
  Status open_hosts(Group& cpu_group, Store& store);
  Status join_host(Status usable);
  bool may_submit(const DeviceOperation* captured) const;
  void submit_ready(std::unique_lock<std::mutex>& lock, const DeviceOperation* captured);
  Status start(DeviceOperation& operation);
  Status start_with(DeviceOperation& operation);
  void give_up(Status why);  // under mutex_
  void watch();
  Status look(std::unique_lock<std::mutex>& lock);
  Status trouble();
  void tell();

  Engine& engine_;
  device::Device& device_;
  intranode::Imports& imports_;
  const device::Stream main_;
  const Topology topology_;
  HostPeers peers_;
  std::unique_ptr<intranode::CopyEngine> copy_engine_;
  std::atomic<uint64_t> limit_ns_;
  bool by_nic_ = false;  // equal on all ranks

  // Held through a call: calls are made one after the other. Never taken by a thread that drives the
  // engine.
  std::mutex calls_;
  Group* cpu_group_;                   // of this host's ranks; nullptr once it is gone
  std::unique_ptr<Group> host_group_;  // that group, if it is a part of the whole one
  PipelineSet pipelines_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<DeviceOperation>> pending_;    // called, not submitted
  std::deque<std::shared_ptr<DeviceOperation>> in_flight_;  // submitted, not finished
  Status broken_;
  bool told_ = true;  // the CPU's group and the pipelines know that
  std::atomic<bool> stop_{false};
  std::thread watch_;
};

}  // namespace smddp
