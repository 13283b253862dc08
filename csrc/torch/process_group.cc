#include "torch/process_group.h"

#include "schedule/pattern.h"
#include "torch/allocator.h"
#include "torch/runtime.h"
#include "torch/store_adapter.h"
#include "torch/tensors.h"

namespace smddp {
namespace {

using c10d::OpType;
using c10d::Work;

// Elements of an AllReduce's parts are cut at multiples of this: whole cache lines for every type.
constexpr size_t kGranule = 64;

uint64_t fnv1a(uint64_t hash, uint64_t value) {
  for (int i = 0; i < 8; ++i) hash = (hash ^ (value >> (8 * i) & 0xff)) * 0x100000001b3ull;
  return hash;
}

std::string sizes_text(const at::Tensor& t) {
  std::string text = std::string(c10::toString(t.scalar_type())) + "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

Tensors joined(const Tensors& first, const TensorLists& lists) {
  Tensors all = first;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

TensorLists one_each(const Tensors& tensors) {
  TensorLists lists;
  for (const at::Tensor& t : tensors) lists.push_back({t});
  return lists;
}

// The parts of blocks of several tensors, tensor by tensor, turned into blocks, rank by rank.
Blocks blocks_of(const std::vector<std::vector<Extent>>& parts, int ranks) {
  Blocks blocks;
  for (int r = 0; r < ranks; ++r) {
    for (const auto& tensor : parts)
      blocks.add(tensor[static_cast<size_t>(r)].address, tensor[static_cast<size_t>(r)].bytes);
    blocks.end_block();
  }
  return blocks;
}

Blocks one_block(const std::vector<Extent>& extents) {
  Blocks blocks;
  for (const Extent& e : extents) blocks.add(e.address, e.bytes);
  blocks.end_block();
  return blocks;
}

}  // namespace

ProcessGroupSMDDP::ProcessGroupSMDDP(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     std::chrono::milliseconds timeout,
                                     const std::string& group_name, Fallback::Factory factory)
    : Backend(rank, size),
      engine_(process_engine()),
      timeout_(timeout),
      fallback_(group_name, std::move(factory)) {
  StoreAdapter adapter(store, rank, timeout);
  Communicator::Options options;
  options.name = group_name;
  options.timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
  auto created = Communicator::create(engine_, adapter, rank, size, std::move(options));
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
  group().set_timeout(static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count()));
  fallback_.set_timeout(timeout);
}

c10d::ErrorType ProcessGroupSMDDP::getError() {
  if (!group_) return c10d::ErrorType::SUCCESS;
  switch (group_->status().code()) {
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
  if (group_) group_->abort("the group was aborted by " + group_->describe(rank_));
  fallback_.abort();
}

void ProcessGroupSMDDP::shutdown() {
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

ProcessGroupSMDDP::OperationPtr ProcessGroupSMDDP::begin(Collective collective,
                                                         std::chrono::milliseconds timeout,
                                                         const Tensors& tensors) const {
  auto op = std::make_shared<TensorOperation>();
  op->collective = collective;
  op->tensors = static_cast<uint32_t>(tensors.size());
  op->digest = 0xcbf29ce484222325ull;
  if (timeout != c10d::kUnsetTimeout && timeout != timeout_ && timeout.count() > 0) {
    op->timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
  }
  if (!tensors.empty()) {
    op->dtype = dtype_of(tensors[0].scalar_type());
    op->element_size = tensors[0].element_size();
  }
  for (const at::Tensor& t : tensors) {
    op->digest = fnv1a(fnv1a(op->digest, t.nbytes()), static_cast<uint64_t>(t.scalar_type()));
    if (t.scalar_type() == tensors[0].scalar_type()) continue;
    op->dtype = Dtype::kBytes;  // mixed types can be moved, in whole bytes
    op->element_size = 1;
  }
  return op;
}

std::vector<Extent> ProcessGroupSMDDP::parts(const Tensors& tensors, bool list) const {
  std::vector<Extent> extents;
  if (list) {
    for (const at::Tensor& t : tensors) extents.push_back(extent_of(t));
    return extents;
  }
  Extent whole = extent_of(tensors[0]);
  size_t part = whole.bytes / static_cast<size_t>(size_);
  for (int r = 0; r < size_; ++r)
    extents.push_back({whole.address + static_cast<size_t>(r) * part, part});
  return extents;
}

intrusive_ptr<Work> ProcessGroupSMDDP::gather_all(const TensorLists& outputs, const Tensors& inputs,
                                                  bool list, const c10d::AllgatherOptions& opts,
                                                  OpType type) {
  require(!inputs.empty() && inputs.size() == outputs.size(),
          "all_gather needs as many outputs as inputs, and at least one");
  OperationPtr op = begin(Collective::kAllGather, opts.timeout, inputs);
  std::vector<std::vector<Extent>> out;
  std::vector<Extent> in;
  for (size_t m = 0; m < inputs.size(); ++m) {
    require(outputs[m].size() == static_cast<size_t>(list ? size_ : 1),
            "all_gather needs one output tensor per rank, " + std::to_string(size_) + "; it got " +
                std::to_string(outputs[m].size()));
    Tensors contiguous;
    for (const at::Tensor& t : outputs[m]) {
      require(t.scalar_type() == inputs[m].scalar_type(),
              "all_gather: input is " + sizes_text(inputs[m]) + ", output is " + sizes_text(t) +
                  "; the types must be equal");
      require(t.numel() == inputs[m].numel() * (list ? 1 : size_),
              "all_gather: with input " + sizes_text(inputs[m]) + " and " + std::to_string(size_) +
                  " ranks, output " + sizes_text(t) + " has the wrong number of elements");
      op->results.push_back(t);
      contiguous.push_back(writable(*op, t));
    }
    out.push_back(parts(contiguous, list));
    at::Tensor input = readable(*op, inputs[m]);
    auto wrong_place = [&](const Extent& e) {
      bool own = e.address == out[m][static_cast<size_t>(rank_)].address;
      Extent i = extent_of(input);
      return overlap_askew(i, e) || (!own && i.bytes > 0 && i.address == e.address);
    };
    if (std::any_of(out[m].begin(), out[m].end(), wrong_place)) {
      input = input.clone();
      op->keep.push_back(input);
    }
    in.push_back(extent_of(input));
  }
  op->input = one_block(in);
  op->output = blocks_of(out, size_);
  return submit(std::move(op), type, opts.asyncOp);
}

intrusive_ptr<Work> ProcessGroupSMDDP::scatter_sums(const Tensors& outputs,
                                                    const TensorLists& inputs, bool list,
                                                    const c10d::ReduceScatterOptions& opts,
                                                    OpType type) {
  require(!outputs.empty() && inputs.size() == outputs.size(),
          "reduce_scatter needs as many inputs as outputs, and at least one");
  OperationPtr op = begin(Collective::kReduceScatter, opts.timeout, outputs);
  op->reduce_op = *reduction_of(opts.reduceOp);
  require(op->dtype != Dtype::kBytes,
          "a coalesced reduce_scatter needs tensors of one type; call it once per type");
  std::vector<std::vector<Extent>> in;
  std::vector<Extent> out;
  for (size_t m = 0; m < outputs.size(); ++m) {
    require(inputs[m].size() == static_cast<size_t>(list ? size_ : 1),
            "reduce_scatter needs one input tensor per rank, " + std::to_string(size_) +
                "; it got " + std::to_string(inputs[m].size()));
    Tensors contiguous;
    for (const at::Tensor& t : inputs[m]) {
      require(t.scalar_type() == outputs[m].scalar_type(),
              "reduce_scatter: input is " + sizes_text(t) + ", output is " +
                  sizes_text(outputs[m]) + "; the types must be equal");
      require(t.numel() == outputs[m].numel() * (list ? 1 : size_),
              "reduce_scatter: with output " + sizes_text(outputs[m]) + " and " +
                  std::to_string(size_) + " ranks, input " + sizes_text(t) +
                  " has the wrong number of elements");
      contiguous.push_back(readable(*op, t));
    }
    in.push_back(parts(contiguous, list));
    // The output may be the own block of the input, which nobody else reads; anywhere else in the
    // input it would overwrite what peers still need.
    Extent target = extent_of(outputs[m]);
    bool askew = false;
    for (int r = 0; r < size_; ++r) {
      const Extent& e = in[m][static_cast<size_t>(r)];
      askew |= overlap_askew(target, e) ||
               (r != rank_ && target.bytes > 0 && target.address == e.address);
    }
    op->results.push_back(outputs[m]);
    out.push_back(extent_of(writable(*op, outputs[m], askew)));
  }
  op->input = blocks_of(in, size_);
  op->output = one_block(out);
  return submit(std::move(op), type, opts.asyncOp);
}

intrusive_ptr<Work> ProcessGroupSMDDP::sum_all(const Tensors& tensors,
                                               const c10d::AllreduceOptions& opts, OpType type) {
  require(!tensors.empty(), "all_reduce needs a tensor");
  OperationPtr op = begin(Collective::kAllReduce, opts.timeout, tensors);
  op->reduce_op = *reduction_of(opts.reduceOp);
  require(op->dtype != Dtype::kBytes,
          "a coalesced all_reduce needs tensors of one type; call it once per type");
  std::vector<Extent> whole;
  size_t count = 0;
  for (const at::Tensor& t : tensors) {
    // A stand-in starts with the values, as it is summed in place.
    at::Tensor contiguous = writable(*op, t);
    if (!contiguous.is_same(t)) contiguous.copy_(t.detach());
    op->results.push_back(t);
    whole.push_back(extent_of(contiguous));
    count += static_cast<size_t>(t.numel());
  }
  Blocks all = one_block(whole);
  std::vector<size_t> starts = pattern::equal_parts(count, size_, kGranule);
  for (size_t r = 0; r + 1 < starts.size(); ++r) {
    size_t bytes = (starts[r + 1] - starts[r]) * op->element_size;
    for (const Extent& e : all.slice(0, starts[r] * op->element_size, bytes))
      op->input.add(e.address, e.bytes);
    op->input.end_block();
  }
  op->output = op->input;
  return submit(std::move(op), type, opts.asyncOp);
}

intrusive_ptr<Work> ProcessGroupSMDDP::submit(OperationPtr op, OpType type, bool async) {
  Communicator& communicator = group();
  ++operations_;
  communicator.submit(op, settings().tuning, async);
  return c10::make_intrusive<WorkSMDDP>(rank_, type, engine_, std::move(op));
}

intrusive_ptr<Work> ProcessGroupSMDDP::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::AllgatherOptions& opts) {
  if (const char* reason = foreign({output, input})) {
    return forwarded(fallback("all_gather", {output}, reason)._allgather_base(output, input, opts));
  }
  return gather_all({{output}}, {input}, false, opts, OpType::_ALLGATHER_BASE);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allgather(TensorLists& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  if (const char* reason = foreign(joined(inputs, outputs))) {
    return forwarded(
        fallback("all_gather", joined({}, outputs), reason).allgather(outputs, inputs, opts));
  }
  return gather_all(outputs, inputs, true, opts, OpType::ALLGATHER);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  if (const char* reason = foreign(joined(inputs, outputs))) {
    return forwarded(fallback("all_gather", joined({}, outputs), reason)
                         .allgather_coalesced(outputs, inputs, opts));
  }
  // torch hands over one list per rank, of one tensor per input.
  TensorLists by_input(inputs.size());
  for (const Tensors& list : outputs) {
    require(list.size() == inputs.size(),
            "all_gather_coalesced needs one output per input in the list of every rank");
    for (size_t m = 0; m < list.size(); ++m) by_input[m].push_back(list[m]);
  }
  return gather_all(by_input, inputs, true, opts, OpType::ALLGATHER_COALESCED);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  if (const char* reason = foreign(joined(inputs, {outputs}))) {
    return forwarded(fallback("all_gather", outputs, reason)
                         .allgather_into_tensor_coalesced(outputs, inputs, opts));
  }
  return gather_all(one_each(outputs), inputs, false, opts, OpType::COALESCED);
}

intrusive_ptr<Work> ProcessGroupSMDDP::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  if (const char* reason = foreign({output, input}, opts.reduceOp)) {
    return forwarded(
        fallback("reduce_scatter", {input}, reason)._reduce_scatter_base(output, input, opts));
  }
  return scatter_sums({output}, {{input}}, false, opts, OpType::_REDUCE_SCATTER_BASE);
}

intrusive_ptr<Work> ProcessGroupSMDDP::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  if (const char* reason = foreign(joined(outputs, inputs), opts.reduceOp)) {
    return forwarded(fallback("reduce_scatter", joined({}, inputs), reason)
                         .reduce_scatter(outputs, inputs, opts));
  }
  return scatter_sums(outputs, inputs, true, opts, OpType::REDUCE_SCATTER);
}

intrusive_ptr<Work> ProcessGroupSMDDP::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  if (const char* reason = foreign(joined(outputs, {inputs}), opts.reduceOp)) {
    return forwarded(fallback("reduce_scatter", inputs, reason)
                         .reduce_scatter_tensor_coalesced(outputs, inputs, opts));
  }
  return scatter_sums(outputs, one_each(inputs), false, opts,
                      OpType::REDUCE_SCATTER_TENSOR_COALESCED);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allreduce(Tensors& tensors,
                                                 const c10d::AllreduceOptions& opts) {
  if (const char* reason = foreign(tensors, opts.reduceOp)) {
    return forwarded(fallback("all_reduce", tensors, reason).allreduce(tensors, opts));
  }
  return sum_all(tensors, opts, OpType::ALLREDUCE);
}

intrusive_ptr<Work> ProcessGroupSMDDP::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  if (const char* reason = foreign(tensors, opts.reduceOp)) {
    return forwarded(fallback("all_reduce", tensors, reason).allreduce_coalesced(tensors, opts));
  }
  return sum_all(tensors, opts, OpType::ALLREDUCE_COALESCED);
}

// Every rank's byte has to arrive before anybody leaves.
intrusive_ptr<Work> ProcessGroupSMDDP::barrier(const c10d::BarrierOptions& opts) {
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
