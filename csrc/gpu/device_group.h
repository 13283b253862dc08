// A group's collectives on device memory.
//
// A call returns once this rank has sent its peers of the host, by an AllGather on the CPU, where its
// memory lies. When all of them have done so, and only then, the whole operation is submitted to the
// device: so no rank's stream waits for something that a process of this host has yet to submit.
// Waiting for an operation makes a stream wait. The host waits only until the operation is submitted,
// that is until its peers of the host have made the call and its streams have room.
//
// A thread that submits blocks in the driver while a stream is full, for as long as the stream waits for a
// peer or for the network; then every thread blocks that calls the device. So a thread that submits holds no lock
// while it does: one of the group that does nothing else, or one that waits for the operation anyway, which spares
// two wake-ups. Operations are submitted in one order for all groups (device/submission_order.h). The
// thread that watches learns from a word in host memory what the device has done, and never calls the device; nor do
// threads that drive the network.
//
// The torch module makes it and calls it. It knows the device only by device/device.h.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/condition_variable.h"
#include "gpu/device_links.h"
#include "gpu/device_operation.h"

namespace smddp {

class DeviceGroup : public std::enable_shared_from_this<DeviceGroup> {
 public:
  // Is told why operations failed which callers' streams wait for, with work behind them that would go on with what is
  // no result. Ends the process: the streams stay as they are.
  using EndProcess = std::function<void(const Status&)>;

  // A call of all ranks of `cpu_group`, whose store `store` is. `usable`: whether this rank has a
  // device; if one rank has none, or its device cannot read the memory of its host's other ranks, no rank
  // gets a group, and the status names that rank. Device, imports and `main` must outlive the group. Only the
  // group may use the stream `main`. `sums`: devices sum, not the CPU. `end_process`: none: callers ask verdict() before
  // they use anything that came from such streams.
  static Result<std::shared_ptr<DeviceGroup>> create(Process& process, Group& cpu_group,
                                                     Store& store, const Status& usable,
                                                     device::Device* device,
                                                     intranode::Imports* imports,
                                                     device::Stream main, uint64_t limit_ns,
                                                     bool sums = true, EndProcess end_process = {});
  ~DeviceGroup();

  // Starts the operation, after all that the stream `callers` holds. That must record no graph if the operation has
  // exchanges.
  Status submit(const std::shared_ptr<DeviceOperation>& operation, device::Stream callers);
  // Waits until all ranks have called the operation or it has failed, for at most `timeout` (zero: no
  // limit). False after that.
  bool await_ranks(DeviceOperation& operation, std::chrono::nanoseconds timeout);
  // Work submitted to `stream` from now on waits for the operation. The host waits until the operation is
  // submitted.
  Status order(DeviceOperation& operation, device::Stream stream);
  // Not ok: the operation's results must not be used. As far as is known now; of an error that comes later,
  // `end_process` is told.
  Status verdict(DeviceOperation& operation);
  // Whether the device is done with it.
  bool closed(const DeviceOperation& operation);

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
  const Topology& topology() const { return links_->topology; }  // of all ranks
  // True if NICs read and write this device's memory in an AllGather along the rails.
  bool by_nic() const { return links_->by_nic; }
  bool kernels() const { return links_->kernels; }  // all ranks' devices can sum

 private:
  DeviceGroup(Engine& engine, device::Device& device, device::Stream main, uint64_t limit_ns,
              std::unique_ptr<DeviceLinks> links, EndProcess end_process);
  bool may_submit(const DeviceOperation* recorded) const;  // that one alone, if given
  void submit_ready(std::unique_lock<std::mutex>& lock, const DeviceOperation* recorded);
  void give_up(Status why);  // under mutex_
  void submit_all();
  void ask_device(std::unique_lock<std::mutex>& lock);
  void watch();
  Status look(std::unique_lock<std::mutex>& lock);
  const DeviceOperation* oldest_on_device() const;
  Status failure();
  void tell();
  bool must_end(uint64_t now);
  void release(uint64_t now);

  Engine& engine_;
  device::Device& device_;
  const device::Stream main_;
  std::atomic<uint64_t> limit_ns_;
  // A pipeline is added to it under both locks. Left without pipelines and groups once the group is gone.
  const std::unique_ptr<DeviceLinks> links_;

  // Held through a call, also while it calls the device: calls are made one after the other. Taken neither
  // by a thread that drives the engine nor by the group's own threads.
  std::mutex calls_;
  uint32_t called_ =
      DeviceLinks::kTrialCall;  // under calls_: the last number for CopyEngine::call()

  std::mutex mutex_;  // not held while the device is called
  // For those who wait for an operation, or for the end; for the thread that submits; for the one that watches.
  std::condition_variable changed_, due_, busy_;
  std::deque<std::shared_ptr<DeviceOperation>> pending_;  // called, not submitted
  std::deque<std::shared_ptr<DeviceOperation>>
      in_flight_;  // being submitted or submitted, not closed
  // Closed. The thread that submits destroys them, as that may call the device.
  std::vector<std::shared_ptr<DeviceOperation>> closed_;
  bool submitting_ = false;  // a thread submits an operation
  uint32_t numbered_ = 0;    // the last number_on_device_
  Status broken_;
  uint64_t broken_ns_ = 0;  // since when
  bool asked_ = false;      // for that by the program itself
  EndProcess end_process_;
  bool ended_ = false;    // it was called
  bool misled_ = false;   // an operation of such a stream was done, perhaps without a peer's data
  bool told_ = true;      // the CPU's group and the pipelines know that
  bool closing_ = false;  // the thread that submits ends
  std::atomic<bool> stop_{false};
  std::thread watch_, submitter_;
};

}  // namespace smddp
