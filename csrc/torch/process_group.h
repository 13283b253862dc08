// The torch.distributed backend: checks tensors, hands their memory to the Group (tensors on CPUs) or to
// DeviceCollectives (tensors on GPUs), and gives every collective that smddp does not own to the visible
// fallback. torch calls it; the module makes it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "group/group.h"
#include "torch/bound_device.h"
#include "torch/coalesced_section.h"
#include "torch/fallback.h"
#include "torch/first_use.h"
#include "torch/group_store.h"
#include "torch/point_to_point.h"
#include "torch/tensors.h"
#include "torch/work.h"

namespace smddp {

using c10::intrusive_ptr;
using WorkPtr = intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

class ProcessGroupSMDDP;
// Routes::Measure of a group.
using MeasureRoutes =
    std::function<std::optional<RouteSteps>(ProcessGroupSMDDP& group, Collective, c10::DeviceType)>;

class ProcessGroupSMDDP final : public c10d::Backend {
 public:
  ProcessGroupSMDDP(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                    std::chrono::milliseconds timeout, const std::string& group_name,
                    Fallback::Factory factory, const MeasureRoutes& measure, std::vector<int> ranks,
                    bool whole_job);
  ~ProcessGroupSMDDP() override;

  const std::string getBackendName() const override { return "smddp"; }
  intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return operations_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  // Connects NCCL, which carries what smddp does not: so a graph can record that. A call of all ranks. torch makes it
  // for backends that split only.
  void eagerConnectSingleDevice(at::Device device) override;
  // NCCL's: torch makes pools of GPU memory with it.
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  // CPU tensors in memory that the ranks of the host read and write in place.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;

  const GroupStore& store() const { return *store_; }
  // Calls `end` once the group has left, after those given before. In a forked child it does not.
  void at_end(std::function<void()> end);
  Routes& routes() { return routes_; }
  // smddp's own.
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  // Of tensors on CPUs; those on GPUs are the fallback's.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  // Refused.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // The fallback's.
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 private:
  // Who carries out a collective on some tensors.
  struct Carrier {
    const char* reason = nullptr;         // not null: the fallback, and why
    DeviceCollectives* device = nullptr;  // not null: the tensors lie on this device
  };
  // By the bytes of `whole`, all ranks' data, the user may route the call. `op`: of sums.
  Carrier carrier(Collective collective, TensorRefs whole, TensorRefs parts,
                  const c10d::ReduceOp* op = nullptr);
  // The larger side has, per tensor of the smaller side, either one tensor for each rank (`list`), one
  // after the other, or one tensor that holds the parts of all ranks.
  size_t per_tensor(bool list) const { return list ? static_cast<size_t>(size_) : 1; }
  // The fallback's `call`, with `arguments`, carries out what smddp does not.
  template <class Call, class... Arguments>
  WorkPtr gather_all(TensorRefs outputs, TensorRefs inputs, bool list,
                     const c10d::AllgatherOptions& opts, c10d::OpType type, Call call,
                     Arguments&... arguments);
  template <class Call, class... Arguments>
  WorkPtr scatter_sums(TensorRefs outputs, TensorRefs inputs, bool list,
                       const c10d::ReduceScatterOptions& opts, c10d::OpType type, Call call,
                       Arguments&... arguments);
  template <class CallOptions>
  WorkPtr sum_all(Tensors& tensors, const CallOptions& opts, c10d::OpType type,
                  WorkPtr (c10d::Backend::*call)(Tensors&, const CallOptions&));
  WorkPtr count(WorkPtr on_device);
  // nullptr if the call was synchronous: the operation is complete then.
  template <class CallOptions>
  WorkPtr submit(std::shared_ptr<TensorOperation> op, const CallOptions& opts, c10d::OpType type);
  WorkPtr pass(Tensors& tensors, bool sends, std::optional<int> peer, int tag);
  Group& group() const;
  // nullptr once the group is destroyed. Any thread may call it at any time.
  std::shared_ptr<Group> group_if_any() const;
  // By which the group's ranks reach this host.
  std::string address_of_host() const;
  void release_groups();
  // Removes from the store what the making of the group has left there, once all ranks have made it.
  void tidy_store(Group& group);
  void leave_store(Group& group);

  c10d::Backend& fallback(const char* operation, TensorRefs tensors, const char* reason);
  // The fallback's `call` carries the operation out, for the reason given; counted under its name.
  template <class... Parameters, class... Arguments>
  WorkPtr forward(const char* operation, TensorRefs tensors, const char* reason,
                  WorkPtr (c10d::Backend::*call)(Parameters...), Arguments&... arguments);

  const std::shared_ptr<GroupStore> store_;
  const std::shared_ptr<Process> process_;
  Engine& engine_;  // its
  std::chrono::milliseconds timeout_;
  Fallback fallback_;
  Routes routes_;
  mutable std::mutex mutex_;
  std::shared_ptr<Group> group_;               // changes under mutex_
  std::vector<std::function<void()>> at_end_;  // too
  PointToPoint messages_;                      // destroyed before the group
  BoundDevice device_;                         // too
  FirstUse first_use_;                         // of device_
  std::atomic<uint64_t> operations_{0};
  std::atomic<bool> store_is_tidy_{false};
  CoalescedSection coalesced_;  // operations since startCoalescing()
};

}  // namespace smddp
