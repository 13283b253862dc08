// The torch.distributed backend: checks tensors, hands segments to the Group, and gives
// everything that smddp does not own to the visible fallback.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/group.h"
#include "torch/device_collectives.h"
#include "torch/fallback.h"
#include "torch/tensors.h"
#include "torch/work.h"

namespace smddp {

using c10::intrusive_ptr;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

class ProcessGroupSMDDP final : public c10d::Backend {
 public:
  ProcessGroupSMDDP(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                    std::chrono::milliseconds timeout, const std::string& group_name,
                    Fallback::Factory factory);
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
  intrusive_ptr<c10d::Work> endCoalescing() override;
  // CPU tensors in memory that the ranks of the host read and write in place.
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;

  // smddp's own.
  intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::AllgatherOptions& opts) override;
  intrusive_ptr<c10d::Work> allgather(TensorLists& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& opts) override;
  intrusive_ptr<c10d::Work> allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& opts) override;
  intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::ReduceScatterOptions& opts) override;
  intrusive_ptr<c10d::Work> reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                           const c10d::ReduceScatterOptions& opts) override;
  intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;
  intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                      const c10d::AllreduceOptions& opts) override;
  intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;

  // The fallback's.
  intrusive_ptr<c10d::Work> allreduce_sparse(Tensors& tensors,
                                             const c10d::AllreduceOptions& opts) override;
  intrusive_ptr<c10d::Work> broadcast(Tensors& tensors,
                                      const c10d::BroadcastOptions& opts) override;
  intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  intrusive_ptr<c10d::Work> gather(TensorLists& outputs, Tensors& inputs,
                                   const c10d::GatherOptions& opts) override;
  intrusive_ptr<c10d::Work> scatter(Tensors& outputs, TensorLists& inputs,
                                    const c10d::ScatterOptions& opts) override;
  intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                          std::vector<int64_t>& output_splits,
                                          std::vector<int64_t>& input_splits,
                                          const c10d::AllToAllOptions& opts) override;
  intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs,
                                     const c10d::AllToAllOptions& opts) override;
  intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override;
  intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override;
  intrusive_ptr<c10d::Work> recvAnysource(Tensors& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 private:
  // Throws unless each of `lists` has one tensor per rank; `what` begins the sentence.
  void require_one_per_rank(const char* what, const TensorLists& lists) const;
  // Of the larger side, per tensor of the smaller one, there is either one tensor for each rank
  // (`list`), in turn, or one that holds all of theirs.
  size_t per_tensor(bool list) const { return list ? static_cast<size_t>(size_) : 1; }
  intrusive_ptr<c10d::Work> gather_all(TensorRefs outputs, TensorRefs inputs, bool list,
                                       const c10d::AllgatherOptions& opts, c10d::OpType type);
  intrusive_ptr<c10d::Work> scatter_sums(TensorRefs outputs, TensorRefs inputs, bool list,
                                         const c10d::ReduceScatterOptions& opts, c10d::OpType type);
  intrusive_ptr<c10d::Work> sum_all(TensorRefs tensors, const c10d::AllreduceOptions& opts,
                                    c10d::OpType type);
  // nullptr where the call was synchronous: it is over then.
  intrusive_ptr<c10d::Work> submit(std::shared_ptr<TensorOperation> op,
                                   std::chrono::milliseconds timeout, c10d::OpType type,
                                   bool async);
  Group& group() const;

  // Where tensors on a GPU are carried; nullptr where they lie elsewhere, or where the group has none,
  // which `no_device_` then explains. The first call for such tensors is one of all ranks.
  DeviceCollectives* on_device(TensorRefs tensors);
  // Why smddp does not carry these tensors itself, or nullptr if it does.
  const char* foreign(TensorRefs tensors);
  const char* foreign(TensorRefs tensors, const c10d::ReduceOp& op);

  c10d::Backend& fallback(const char* operation, TensorRefs tensors, const char* reason);
  intrusive_ptr<c10d::Work> forwarded(intrusive_ptr<c10d::Work> work);
  // Of a coalesced section: its end waits for the work, which is handed on.
  intrusive_ptr<c10d::Work> noted(intrusive_ptr<c10d::Work> work);

  Engine& engine_;
  std::unique_ptr<Store> store_;
  std::chrono::milliseconds timeout_;
  Fallback fallback_;
  std::unique_ptr<Group> group_;
  std::mutex device_mutex_;
  bool device_tried_ = false;
  std::string no_device_;
  std::unique_ptr<DeviceCollectives> device_;  // goes before the group
  std::atomic<uint64_t> operations_{0};
  bool coalescing_ = false;
  std::vector<intrusive_ptr<c10d::Work>> coalesced_;  // forwarded since startCoalescing()
};

}  // namespace smddp
