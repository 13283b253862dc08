#include "torch/process_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/allocator.h"
#include "torch/host_operations.h"
#include "torch/runtime.h"
#include "torch/store_adapter.h"

namespace smddp {
namespace {

using c10d::OpType;
using c10d::Work;

TensorRefList joined(TensorRefs first, TensorRefs rest) {
  TensorRefList all(first);
  all.append(rest.begin(), rest.end());
  return all;
}

TensorRefList joined(const Tensors& first, const TensorLists& lists) {
  return joined(refs(first), refs(lists));
}

}  // namespace

ProcessGroupSMDDP::ProcessGroupSMDDP(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     std::chrono::milliseconds timeout,
                                     const std::string& group_name, Fallback::Factory factory)
    : Backend(rank, size),
      engine_(process_engine()),
      timeout_(timeout),
      fallback_(group_name, std::move(factory)) {
  store_ = std::make_unique<StoreAdapter>(store, rank, timeout);
  Group::Options options;
  options.name = group_name;
  options.timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
  auto created = Group::create(engine_, *store_, rank, size, std::move(options));
  if (!created) throw_status(created.status());
  group_ = std::move(created.value());
}

ProcessGroupSMDDP::~ProcessGroupSMDDP() = default;

Group& ProcessGroupSMDDP::group() const {
  require(group_ != nullptr, "the group was destroyed; no operation can use it any more");
  require(!engine_.forked(), "a forked process can't use its parent's group; start it with spawn");
  return *group_;
}

intrusive_ptr<c10d::Backend::Options> ProcessGroupSMDDP::getBackendOptions() {
  return c10::make_intrusive<Options>("smddp", timeout_);
}

void ProcessGroupSMDDP::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  if (device_) {
    device_->group().set_limit(static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count()));
  }
  group().set_timeout(static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count()));
  fallback_.set_timeout(timeout);
}

c10d::ErrorType ProcessGroupSMDDP::getError() {
  if (!group_) return c10d::ErrorType::SUCCESS;
  Status status = group_->status();
  if (status && device_) status = device_->group().status();
  switch (status.code()) {
    case Code::kOk:
      return c10d::ErrorType::SUCCESS;
    case Code::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case Code::kAborted:
    case Code::kPeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void ProcessGroupSMDDP::abort() {
  if (device_) device_->group().abort("the group was aborted by " + group_->describe(rank_));
  if (group_) group_->abort("the group was aborted by " + group_->describe(rank_));
  fallback_.abort();
}

void ProcessGroupSMDDP::shutdown() {
  device_.reset();
  group_.reset();
  fallback_.shutdown();
}

std::shared_ptr<c10::Allocator> ProcessGroupSMDDP::getMemAllocator() {
  return {&shared_allocator(), [](c10::Allocator*) {}};
}

at::Tensor ProcessGroupSMDDP::allocateTensor(long size, at::TensorOptions options) {
  return shared_empty({size}, options);
}

// A CPU device has no index, unlike the CUDA devices that a group may serve as well.
bool ProcessGroupSMDDP::supportsTensorAlloc(c10::DeviceIndex device) { return device < 0; }

// --- smddp's own ---------------------------------------------------------------------------------

DeviceCollectives* ProcessGroupSMDDP::on_device(TensorRefs tensors) {
  if (!TorchDevice::concerns(tensors)) return nullptr;
  Group& core_group = group();
  std::lock_guard lock(device_mutex_);
  if (!std::exchange(device_tried_, true)) {
    auto made =
        DeviceCollectives::create(engine_, core_group, *store_, TorchDevice::of(tensors), timeout_);
    if (made) {
      device_ = std::move(made.value());
    } else {
      no_device_ = "smddp can't carry this group's GPU tensors: " + made.status().message();
    }
  }
  if (device_) {
    auto device = TorchDevice::of(tensors);
    require(device.ok() && device.value() == &device_->device(),
            "a group carries tensors of one GPU per rank; this one began with another GPU");
  }
  return device_.get();
}

const char* ProcessGroupSMDDP::foreign(TensorRefs tensors) {
  if (const char* reason = smddp::foreign(tensors)) return reason;
  if (tensors.empty() || tensors[0]->is_cpu() || on_device(tensors) != nullptr) return nullptr;
  return no_device_.empty() ? "SMDDP_DEVICE is off" : no_device_.c_str();
}

const char* ProcessGroupSMDDP::foreign(TensorRefs tensors, const c10d::ReduceOp& op) {
  if (const char* reason = smddp::foreign(tensors, op)) return reason;
  return foreign(tensors);
}

void ProcessGroupSMDDP::require_one_per_rank(const char* what, const TensorLists& lists) const {
  for (const Tensors& list : lists) {
    require(list.size() == static_cast<size_t>(size_), [&] {
      return std::string(what) + " tensor per rank, " + std::to_string(size_) + "; it got " +
             std::to_string(list.size());
    });
  }
}

intrusive_ptr<Work> ProcessGroupSMDDP::gather_all(TensorRefs outputs, TensorRefs inputs, bool list,
                                                  const c10d::AllgatherOptions& opts, OpType type) {
  require(!inputs.empty() && outputs.size() == inputs.size() * per_tensor(list),
          "all_gather needs as many outputs as inputs, and at least one");
  if (DeviceCollectives* device = on_device(joined(outputs, inputs))) {
    ++operations_;
    return noted(device->gather(outputs, inputs, list, opts.timeout, type, opts.asyncOp));
  }
  return submit(gather_of(outputs, inputs, list, rank_, size_), opts.timeout, type, opts.asyncOp);
}

intrusive_ptr<Work> ProcessGroupSMDDP::scatter_sums(TensorRefs outputs, TensorRefs inputs,
                                                    bool list,
                                                    const c10d::ReduceScatterOptions& opts,
                                                    OpType type) {
  require(!outputs.empty() && inputs.size() == outputs.size() * per_tensor(list),
          "reduce_scatter needs as many inputs as outputs, and at least one");
  ReduceOp op = *reduction_of(opts.reduceOp);
  if (DeviceCollectives* device = on_device(joined(outputs, inputs))) {
    ++operations_;
    return noted(device->scatter(outputs, inputs, list, op, opts.timeout, type, opts.asyncOp));
  }
  return submit(scatter_of(outputs, inputs, list, op, rank_, size_), opts.timeout, type,
                opts.asyncOp);
}

intrusive_ptr<Work> ProcessGroupSMDDP::sum_all(TensorRefs tensors,
                                               const c10d::AllreduceOptions& opts, OpType type) {
  require(!tensors.empty(), "all_reduce needs a tensor");
  ReduceOp op = *reduction_of(opts.reduceOp);
  if (DeviceCollectives* device = on_device(tensors)) {
    ++operations_;
    return noted(device->reduce(tensors, op, opts.timeout, type, opts.asyncOp));
  }
  return submit(sum_of(tensors, op, size_), opts.timeout, type, opts.asyncOp);
}

intrusive_ptr<Work> ProcessGroupSMDDP::submit(std::shared_ptr<TensorOperation> op,
                                              std::chrono::milliseconds timeout, OpType type,
                                              bool async) {
  Group& core_group = group();
  ++operations_;
  if (timeout != c10d::kUnsetTimeout && timeout != timeout_ && timeout.count() > 0) {
    op->timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
  }
  core_group.submit(op, settings().tuning, async);
  // A synchronous call that returns no Work is over, as torch sees it, which saves it the Work and a
  // wait() from Python. (Only a graph's inputs, while one is traced, are registered with their Work.)
  if (!async && !c10d::allow_inflight_collective_as_graph_input()) {
    await(engine_, *op, kNoTimeout);
    return nullptr;
  }
  return c10::make_intrusive<WorkSMDDP>(rank_, type, engine_, std::move(op));
}

intrusive_ptr<Work> ProcessGroupSMDDP::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::AllgatherOptions& opts) {
  const at::Tensor *to = &output, *from = &input;
  if (const char* reason = foreign({to, from})) {
    return forwarded(fallback("all_gather", to, reason)._allgather_base(output, input, opts));
  }
  return gather_all(to, from, false, opts, OpType::_ALLGATHER_BASE);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allgather(TensorLists& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  if (const char* reason = foreign(joined(inputs, outputs))) {
    return forwarded(
        fallback("all_gather", refs(outputs), reason).allgather(outputs, inputs, opts));
  }
  require_one_per_rank("all_gather needs one output", outputs);
  return gather_all(refs(outputs), refs(inputs), true, opts, OpType::ALLGATHER);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  if (const char* reason = foreign(joined(inputs, outputs))) {
    return forwarded(
        fallback("all_gather", refs(outputs), reason).allgather_coalesced(outputs, inputs, opts));
  }
  // torch hands over one list per rank, of one tensor per input.
  for (const Tensors& list : outputs) {
    require(list.size() == inputs.size(),
            "all_gather_coalesced needs one output per input in the list of every rank");
  }
  TensorRefList by_input;
  for (size_t m = 0; m < inputs.size(); ++m) {
    for (const Tensors& list : outputs) by_input.push_back(&list[m]);
  }
  return gather_all(by_input, refs(inputs), true, opts, OpType::ALLGATHER_COALESCED);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  if (const char* reason = foreign(joined(inputs, {outputs}))) {
    return forwarded(fallback("all_gather", refs(outputs), reason)
                         .allgather_into_tensor_coalesced(outputs, inputs, opts));
  }
  return gather_all(refs(outputs), refs(inputs), false, opts, OpType::COALESCED);
}

intrusive_ptr<Work> ProcessGroupSMDDP::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  const at::Tensor *to = &output, *from = &input;
  if (const char* reason = foreign({to, from}, opts.reduceOp)) {
    return forwarded(
        fallback("reduce_scatter", from, reason)._reduce_scatter_base(output, input, opts));
  }
  return scatter_sums(to, from, false, opts, OpType::_REDUCE_SCATTER_BASE);
}

intrusive_ptr<Work> ProcessGroupSMDDP::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  if (const char* reason = foreign(joined(outputs, inputs), opts.reduceOp)) {
    return forwarded(
        fallback("reduce_scatter", refs(inputs), reason).reduce_scatter(outputs, inputs, opts));
  }
  require_one_per_rank("reduce_scatter needs one input", inputs);
  return scatter_sums(refs(outputs), refs(inputs), true, opts, OpType::REDUCE_SCATTER);
}

intrusive_ptr<Work> ProcessGroupSMDDP::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  if (const char* reason = foreign(joined(outputs, {inputs}), opts.reduceOp)) {
    return forwarded(fallback("reduce_scatter", refs(inputs), reason)
                         .reduce_scatter_tensor_coalesced(outputs, inputs, opts));
  }
  return scatter_sums(refs(outputs), refs(inputs), false, opts,
                      OpType::REDUCE_SCATTER_TENSOR_COALESCED);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allreduce(Tensors& tensors,
                                                 const c10d::AllreduceOptions& opts) {
  TensorRefList all = refs(tensors);
  if (const char* reason = foreign(all, opts.reduceOp)) {
    return forwarded(fallback("all_reduce", all, reason).allreduce(tensors, opts));
  }
  return sum_all(all, opts, OpType::ALLREDUCE);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  TensorRefList all = refs(tensors);
  if (const char* reason = foreign(all, opts.reduceOp)) {
    return forwarded(fallback("all_reduce", all, reason).allreduce_coalesced(tensors, opts));
  }
  return sum_all(all, opts, OpType::ALLREDUCE_COALESCED);
}

intrusive_ptr<Work> ProcessGroupSMDDP::barrier(const c10d::BarrierOptions& opts) {
  if (device_) {  // as NCCL's: what the caller's stream holds is done as well
    device::Device& device = device_->device().device();
    if (Status s = device.synchronize(device_->device().current()); !s) throw_status(s);
  }
  return submit(barrier_of(size_), opts.timeout, OpType::BARRIER, opts.asyncOp);
}

}  // namespace smddp
