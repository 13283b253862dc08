// A group's collectives on device memory.
//
// A call returns once it has said, over the CPU path of the ranks of its host, where its memory lies.
// When all of them have (and only then: nobody's stream waits for something that a host of this node has
// yet to submit), the whole operation is submitted to the device, in the order of the calls: by whichever
// thread hears of it, or, where there is a pipeline, by the thread that watches, so that those that
// drive the network never call the device. Waiting for an operation makes a stream wait; the host waits
// for no more than its submission, which is for peers of its host that have not made the call yet.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/group.h"
#include "common/file_descriptor.h"
#include "gpu_collectives/pinned_pipeline.h"
#include "intranode/copy_engine.h"

namespace smddp {

class DeviceGroup;
struct Joining;

// On the host it is an AllGather of where the memory lies.
class DeviceOperation : public Operation {
 public:
  ~DeviceOperation() override;

  Signature what;               // of the collective itself
  std::vector<Extent> offered;  // what the peers of this host read; equal sizes on all ranks
  intranode::CopyEngine::Plan plan;
  // What goes through pinned memory, after the plan's sums and before its moves: among the ranks of this
  // rank's rail, or among all.
  std::optional<PinnedPipeline::Exchange> exchange;
  bool among_all = false;
  uint64_t limit_ns = 0;  // of the whole, from the call on; 0: the group's

 protected:
  // The device has all of it, up to what the group's stream holds now. Quick; other operations wait.
  virtual void on_submitted() {}
  // It is over: done by the device, or failed. Comes once, at most a moment after the device is done.
  virtual void on_finished(const Status&) {}
  // What a stream waits for; valid from on_submitted() on.
  device::Event finished_event() const { return finished_; }

 private:
  friend class DeviceGroup;
  void on_done() override;

  std::shared_ptr<DeviceGroup> group_;
  device::Event ready_ = nullptr, finished_ = nullptr;
  std::vector<std::byte> sent_, received_;
  bool captured_ = false;  // into a graph: submitted by the thread that records it
  std::atomic<bool> exchanged_{false};
  bool submitted_ = false;  // or failed
  bool began_ = false;      // the device has it; written once, before submitted_
  bool in_part_ = false;    // the device has some of it, and the rest failed
  bool ended_ = false;      // well
  Status outcome_;
  std::shared_ptr<const PinnedPipeline::Outcome> exchange_outcome_;
  uint64_t started_ns_ = 0;
};

class DeviceGroup : public std::enable_shared_from_this<DeviceGroup> {
 public:
  // A call of all ranks of `cpu_group`, whose store `store` is. `usable`: whether this rank has a
  // device at all; if one rank has not, no rank gets a group, and the status names it. Device, imports
  // and `main` must outlive the group, and `main` belongs to it alone.
  static Result<std::shared_ptr<DeviceGroup>> create(Engine& engine, Group& cpu_group, Store& store,
                                                     Status usable, device::Device* device,
                                                     intranode::Imports* imports,
                                                     device::Stream main, uint64_t limit_ns);
  ~DeviceGroup();

  // Starts it, after all that `callers` holds.
  Status submit(const std::shared_ptr<DeviceOperation>& operation, device::Stream callers);
  // Work submitted to `stream` from now on waits for the operation. The host waits until it is
  // submitted, for that long (zero: no limit); kTimeout after that.
  Status order(DeviceOperation& operation, device::Stream stream, std::chrono::nanoseconds timeout);
  // Why the operation's results must not be used, as far as is known now.
  Status verdict(const DeviceOperation& operation);
  // Whether the device is done with it.
  bool finished(const DeviceOperation& operation);

  // Before the first operation with `among_all`; a call of all ranks.
  Status open_for_all(Group& cpu_group, Store& store);

  Status status();
  void set_limit(uint64_t limit_ns);
  // Fails all that is under way, here and on the peers.
  void abort(const std::string& reason);
  // The cpu_group is about to go. Waits for what the device has.
  void leave();

  device::Device& device() { return device_; }
  const Topology& topology() const { return topology_; }  // of all ranks
  // What an AllGather sends along the rails goes out of this device's memory and into it by the NIC.
  bool by_nic() const { return by_nic_; }
  Rank rank() const { return rank_; }

 private:
  friend class DeviceOperation;
  DeviceGroup(Engine& engine, Group& cpu_group, device::Device& device, intranode::Imports& imports,
              device::Stream main, uint64_t limit_ns);
  Status open_hosts(Group& cpu_group, Store& store);
  Status join_node(Status usable);
  Status join(const std::vector<Joining>& joined);
  PinnedPipeline* pipeline_of(const DeviceOperation& operation) const;
  bool may_submit(const DeviceOperation* captured) const;
  void exchanged(DeviceOperation& operation);
  void submit_ready(std::unique_lock<std::mutex>& lock, const DeviceOperation* captured);
  Status start(DeviceOperation& operation);
  Status start_with(DeviceOperation& operation);
  void give_up(Status why);  // under the lock
  void watch();
  void look(std::unique_lock<std::mutex>& lock);
  Status trouble();
  void tell();

  Engine& engine_;
  device::Device& device_;
  intranode::Imports& imports_;
  const device::Stream main_;
  const Topology topology_;
  const Rank rank_;
  const int index_, ranks_;         // on this host, as are the following
  std::vector<std::string> names_;  // of the ranks
  std::vector<int> pids_;
  std::vector<FileDescriptor> alive_;  // readable once that rank's process is gone
  std::unique_ptr<intranode::CopyEngine> copy_engine_;
  std::atomic<uint64_t> limit_ns_;
  std::vector<uint64_t> gone_since_ns_;
  bool by_nic_ = false;  // equal on all ranks

  // Calls are made one after the other. Never taken by whom the engine calls.
  std::mutex calls_;
  Group* cpu_group_;             // of this host's ranks; nullptr once it is gone
  std::unique_ptr<Group> node_;  // that, where it is a part of the group
  // Those of this rank's local index on every host; all ranks.
  std::unique_ptr<PinnedPipeline> rail_, all_;
  std::atomic<bool> piped_{false};  // there is one of them

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<DeviceOperation>> pending_;    // called, not submitted
  std::deque<std::shared_ptr<DeviceOperation>> in_flight_;  // submitted, not finished
  Status broken_;
  bool told_ = true;  // the cpu_group knows that
  std::atomic<bool> stop_{false};
  std::thread watch_;
};

}  // namespace smddp
