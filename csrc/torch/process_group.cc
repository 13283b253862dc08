#include "torch/process_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

#include "schedule/pattern.h"
#include "torch/allocator.h"
#include "torch/runtime.h"
#include "torch/store_adapter.h"
#include "torch/tensors.h"

namespace smddp {
namespace {

using c10d::OpType;
using c10d::Work;

// Two ranks that disagree about one tensor get different digests: each step is invertible.
uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
  return hash ^ hash >> 32;
}

std::string sizes_text(const at::Tensor& t) {
  std::string text = std::string(c10::toString(t.scalar_type())) + "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

TensorRefList joined(const Tensors& first, const TensorLists& lists) {
  TensorRefList all = refs(first), rest = refs(lists);
  all.append(rest.begin(), rest.end());
  return all;
}

using Extents = c10::SmallVector<Extent, 8>;

// Appends `count` equal parts of `whole`.
void append(Extents& extents, const Extent& whole, size_t count) {
  size_t bytes = whole.bytes / count;
  for (size_t i = 0; i < count; ++i) extents.push_back({whole.address + i * bytes, bytes});
}

// The parts of several tensors, tensor by tensor and in each rank by rank, become blocks.
void fill(Blocks& blocks, const Extents& parts, size_t ranks) {
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = r; i < parts.size(); i += ranks) blocks.add(parts[i].address, parts[i].bytes);
    blocks.end_block();
  }
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
  Communicator::Options options;
  options.name = group_name;
  options.timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
  auto created = Communicator::create(engine_, *store_, rank, size, std::move(options));
  if (!created) throw_status(created.status());
  group_ = std::move(created.value());
}

ProcessGroupSMDDP::~ProcessGroupSMDDP() = default;

Communicator& ProcessGroupSMDDP::group() const {
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
  Communicator& communicator = group();
  std::lock_guard lock(device_mutex_);
  if (!std::exchange(device_tried_, true)) {
    auto made = DeviceCollectives::create(engine_, communicator, *store_, TorchDevice::of(tensors),
                                          timeout_);
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

ProcessGroupSMDDP::OperationPtr ProcessGroupSMDDP::begin(Collective collective,
                                                         std::chrono::milliseconds timeout,
                                                         TensorRefs tensors) const {
  auto op = std::make_shared<TensorOperation>();
  op->collective = collective;
  op->tensors = static_cast<uint32_t>(tensors.size());
  op->digest = 0xcbf29ce484222325ull;
  if (timeout != c10d::kUnsetTimeout && timeout != timeout_ && timeout.count() > 0) {
    op->timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
  }
  if (tensors.empty()) return op;
  at::ScalarType type = tensors[0]->scalar_type();
  op->dtype = dtype_of(type);
  op->element_size = tensors[0]->element_size();
  for (const at::Tensor* t : tensors) {
    op->digest = mix(mix(op->digest, t->nbytes()), static_cast<uint64_t>(t->scalar_type()));
    if (t->scalar_type() == type) continue;
    op->dtype = Dtype::kBytes;  // mixed types can be moved, in whole bytes
    op->element_size = 1;
  }
  return op;
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
  auto ranks = static_cast<size_t>(size_);
  size_t each = list ? ranks : 1;
  require(!inputs.empty() && outputs.size() == inputs.size() * each,
          "all_gather needs as many outputs as inputs, and at least one");
  TensorRefList all(outputs.begin(), outputs.end());
  all.append(inputs.begin(), inputs.end());
  if (DeviceCollectives* device = on_device(all)) {
    ++operations_;
    return noted(device->gather(outputs, inputs, list, opts.timeout, type, opts.asyncOp));
  }
  OperationPtr op = begin(Collective::kAllGather, opts.timeout, inputs);
  Extents in, out;
  for (size_t m = 0; m < inputs.size(); ++m) {
    const at::Tensor& input = *inputs[m];
    for (const at::Tensor* t : outputs.slice(m * each, each)) {
      require(t->scalar_type() == input.scalar_type(), [&] {
        return "all_gather: input is " + sizes_text(input) + ", output is " + sizes_text(*t) +
               "; the types must be equal";
      });
      require(t->numel() == input.numel() * (list ? 1 : size_), [&] {
        return "all_gather: with input " + sizes_text(input) + " and " + std::to_string(size_) +
               " ranks, output " + sizes_text(*t) + " has the wrong number of elements";
      });
      append(out, writable(*op, *t), ranks / each);
    }
    Extent source = readable(*op, input);
    const Extent* blocks = &out[m * ranks];
    const Extent& own = blocks[rank_];
    auto wrong_place = [&](const Extent& e) {
      return overlap_askew(source, e) ||
             (e.address != own.address && source.bytes > 0 && source.address == e.address);
    };
    if (std::any_of(blocks, blocks + ranks, wrong_place)) {
      at::Tensor copy = op->keep.back().clone();
      source = extent_of(copy);
      op->keep.push_back(std::move(copy));
    }
    in.push_back(source);
  }
  fill(op->input, in, 1);
  fill(op->output, out, ranks);
  return submit(std::move(op), type, opts.asyncOp);
}

intrusive_ptr<Work> ProcessGroupSMDDP::scatter_sums(TensorRefs outputs, TensorRefs inputs,
                                                    bool list,
                                                    const c10d::ReduceScatterOptions& opts,
                                                    OpType type) {
  auto ranks = static_cast<size_t>(size_);
  size_t each = list ? ranks : 1;
  require(!outputs.empty() && inputs.size() == outputs.size() * each,
          "reduce_scatter needs as many inputs as outputs, and at least one");
  TensorRefList all(outputs.begin(), outputs.end());
  all.append(inputs.begin(), inputs.end());
  if (DeviceCollectives* device = on_device(all)) {
    ++operations_;
    return noted(device->scatter(outputs, inputs, list, *reduction_of(opts.reduceOp), opts.timeout,
                                 type, opts.asyncOp));
  }
  OperationPtr op = begin(Collective::kReduceScatter, opts.timeout, outputs);
  op->reduce_op = *reduction_of(opts.reduceOp);
  require(op->dtype != Dtype::kBytes,
          "a coalesced reduce_scatter needs tensors of one type; call it once per type");
  Extents in, out;
  for (size_t m = 0; m < outputs.size(); ++m) {
    const at::Tensor& output = *outputs[m];
    for (const at::Tensor* t : inputs.slice(m * each, each)) {
      require(t->scalar_type() == output.scalar_type(), [&] {
        return "reduce_scatter: input is " + sizes_text(*t) + ", output is " + sizes_text(output) +
               "; the types must be equal";
      });
      require(t->numel() == output.numel() * (list ? 1 : size_), [&] {
        return "reduce_scatter: with output " + sizes_text(output) + " and " +
               std::to_string(size_) + " ranks, input " + sizes_text(*t) +
               " has the wrong number of elements";
      });
      append(in, readable(*op, *t), ranks / each);
    }
    // The output may be the own block of the input, which nobody else reads; anywhere else in the
    // input it would overwrite what peers still need.
    Extent target = extent_of(output);
    bool askew = false;
    for (size_t r = 0; r < ranks; ++r) {
      const Extent& e = in[m * ranks + r];
      askew |= overlap_askew(target, e) ||
               (r != static_cast<size_t>(rank_) && target.bytes > 0 && target.address == e.address);
    }
    out.push_back(writable(*op, output, askew));
  }
  fill(op->input, in, ranks);
  fill(op->output, out, 1);
  return submit(std::move(op), type, opts.asyncOp);
}

intrusive_ptr<Work> ProcessGroupSMDDP::sum_all(TensorRefs tensors,
                                               const c10d::AllreduceOptions& opts, OpType type) {
  require(!tensors.empty(), "all_reduce needs a tensor");
  if (DeviceCollectives* device = on_device(tensors)) {
    ++operations_;
    return noted(
        device->reduce(tensors, *reduction_of(opts.reduceOp), opts.timeout, type, opts.asyncOp));
  }
  OperationPtr op = begin(Collective::kAllReduce, opts.timeout, tensors);
  op->reduce_op = *reduction_of(opts.reduceOp);
  require(op->dtype != Dtype::kBytes,
          "a coalesced all_reduce needs tensors of one type; call it once per type");
  Extents whole;
  size_t count = 0;
  for (const at::Tensor* t : tensors) {
    size_t stand_ins = op->copy_back.size();
    whole.push_back(writable(*op, *t));
    // A stand-in starts with the values, as it is summed in place.
    if (op->copy_back.size() > stand_ins) op->copy_back.back().second.copy_(t->detach());
    count += static_cast<size_t>(t->numel());
  }
  std::vector<size_t> starts = pattern::equal_parts(count, size_, pattern::kGranule);
  // Both walk on together: the parts of the whole, and the tensors that it lies in.
  auto at = whole.begin();
  size_t offset = 0;
  for (size_t r = 0; r + 1 < starts.size(); ++r) {
    size_t left = (starts[r + 1] - starts[r]) * op->element_size;
    while (left > 0) {
      size_t bytes = std::min(left, at->bytes - offset);
      op->input.add(at->address + offset, bytes);
      left -= bytes;
      offset += bytes;
      if (offset == at->bytes) {
        ++at;
        offset = 0;
      }
    }
    op->input.end_block();
  }
  op->output = op->input;
  return submit(std::move(op), type, opts.asyncOp);
}

intrusive_ptr<Work> ProcessGroupSMDDP::submit(OperationPtr op, OpType type, bool async) {
  Communicator& communicator = group();
  ++operations_;
  communicator.submit(op, settings().tuning, async);
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

// Every rank's byte has to arrive before anybody leaves.
intrusive_ptr<Work> ProcessGroupSMDDP::barrier(const c10d::BarrierOptions& opts) {
  if (device_) {  // as NCCL's: what the caller's stream holds is done as well
    device::Device& device = device_->device().device();
    if (Status s = device.synchronize(device_->device().current()); !s) throw_status(s);
  }
  OperationPtr op = begin(Collective::kBarrier, opts.timeout, {});
  op->scratch.resize(static_cast<size_t>(size_) + 1);
  op->input.add(&op->scratch.back(), 1);
  op->input.end_block();
  for (int r = 0; r < size_; ++r) {
    op->output.add(&op->scratch[static_cast<size_t>(r)], 1);
    op->output.end_block();
  }
  return submit(std::move(op), OpType::BARRIER, opts.asyncOp);
}

}  // namespace smddp
