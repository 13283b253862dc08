#include "torch/process_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "joining/info_exchange.h"
#include "joining/joining.h"
#include "torch/allocator.h"
#include "torch/error_state.h"
#include "torch/future_threads.h"
#include "torch/gradient_label.h"
#include "torch/host_operations.h"
#include "torch/live_groups.h"
#include "torch/runtime.h"

namespace smddp {
namespace {

using c10d::OpType;

constexpr char kNotOurs[] =
    "smddp owns all_gather, reduce_scatter, all_reduce and barrier, and on CPUs broadcast, reduce, "
    "gather, scatter, all_to_all, send and recv";

constexpr char kRecorded[] =
    "a CUDA graph is being recorded, and this collective passes through the CPU (between hosts, or "
    "a sum with reduce_on \"cpu\")";

TensorRefList joined(TensorRefs first, TensorRefs rest) {
  TensorRefList all(first);
  all.append(rest.begin(), rest.end());
  return all;
}

// The tensors of all_gather_coalesced's outputs, input by input. torch hands over one list per rank; each
// list has one tensor per input.
TensorRefList by_input(const TensorLists& outputs, size_t inputs) {
  for (const Tensors& list : outputs) {
    require(list.size() == inputs,
            "all_gather_coalesced needs one output per input in the list of every rank");
  }
  TensorRefList all;
  for (size_t m = 0; m < inputs; ++m) {
    for (const Tensors& list : outputs) all.push_back(&list[m]);
  }
  return all;
}

// Throws unless each of `lists` has one tensor per rank; `what` begins the sentence.
void require_one_per_rank(const char* what, const TensorLists& lists, int size) {
  for (const Tensors& list : lists) {
    require(list.size() == static_cast<size_t>(size), [&] {
      return std::string(what) + " tensor per rank, " + std::to_string(size) + "; it got " +
             std::to_string(list.size());
    });
  }
}

c10d::ErrorType error_type(Code code) {
  if (code == Code::kOk) return c10d::ErrorType::SUCCESS;
  if (code == Code::kTimeout) return c10d::ErrorType::TIMEOUT;
  bool remote = code == Code::kAborted || code == Code::kPeerLost;
  return remote ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
}

// The other ranks of the group wait for this one: they are told if it has no engine.
std::shared_ptr<Process> process_for(Store& store, int rank, const std::string& group_name) {
  auto process = this_process();
  if (process) return process.value();
  Group::Options options;
  options.name = group_name;
  throw_status(tell_failure(store, rank, options, process.status()));
}

}  // namespace

ProcessGroupSMDDP::ProcessGroupSMDDP(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     std::chrono::milliseconds timeout,
                                     const std::string& group_name, Fallback::Factory factory,
                                     const MeasureRoutes& measure, std::vector<int> ranks,
                                     bool whole_job)
    : Backend(rank, size),
      store_(std::make_shared<GroupStore>(store, rank, size, timeout, std::move(ranks))),
      process_(process_for(store_->part(), rank, group_name)),
      engine_(process_->engine()),
      timeout_(timeout),
      fallback_(group_name, store_->rendezvous(), std::move(factory),
                [this] { return address_of_host(); }),
      routes_(size > 1 ? settings().routes : RouteTable(),
              [this, measure](auto... asked) { return measure(*this, asked...); }),
      messages_(engine_, store_),
      device_(process_, store_->part()) {
  Group::Options options;
  options.name = group_name;
  options.timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
  options.silence_ns = settings().silence_ns;
  options.routes = text_of(settings().routes);
  options.whole_job = whole_job;
  auto created = Group::create(*process_, store_->part(), rank, size, std::move(options));
  if (!created) throw_status(created.status());
  group_ = std::move(created.value());
  LiveGroups::process().add(group_.get());
  store_->forget_rendezvous();
}

ProcessGroupSMDDP::~ProcessGroupSMDDP() {
  without_gil([](void* self) { static_cast<ProcessGroupSMDDP*>(self)->release_groups(); }, this);
}

std::shared_ptr<Group> ProcessGroupSMDDP::group_if_any() const {
  std::lock_guard lock(mutex_);
  return group_;
}

std::string ProcessGroupSMDDP::address_of_host() const {
  auto group = group_if_any();
  if (!group) return {};
  if (group->topology().nodes() == 1) return "127.0.0.1";
  Engine::Lock lock = engine_.lock();
  return process_->network().ip();
}

// On another thread: a store that does not answer delays no operation.
void ProcessGroupSMDDP::tidy_store(Group& group) {
  if (!group.made_by_all() || store_is_tidy_.exchange(true)) return;
  auto keys = group.take_last_keys();
  if (keys.empty()) return;
  FutureThreads::process().run([store = store_, keys = std::move(keys)] {
    for (const std::string& key : keys) store->part().remove(key);
  });
}

// No operation has shown that all ranks have made the group: the last one that gives it up tidies for all.
void ProcessGroupSMDDP::leave_store(Group& group) {
  const Topology& topology = group.topology();
  if (topology.nodes() == 1 || !group.status() || store_is_tidy_.exchange(true)) return;
  auto keys = InfoExchange::last_keys_of(topology.first_of_hosts());
  FutureThreads::process().run([store = store_, ranks = group.ranks(), keys = std::move(keys)] {
    if (!store->leave(ranks)) return;
    for (const std::string& key : keys) store->part().remove(key);
  });
}

void ProcessGroupSMDDP::release_groups() {
  if (auto group = group_if_any(); group && !store_is_tidy_) {
    tidy_store(*group);
    leave_store(*group);
  }
  messages_.release();
  device_.release();
  std::shared_ptr<Group> released;
  std::vector<std::function<void()>> ends;
  {
    std::lock_guard lock(mutex_);
    released.swap(group_);
    ends.swap(at_end_);
  }
  LiveGroups::process().remove(released.get());
  released = nullptr;
  for (const auto& end : ends) {
    if (!engine_.forked()) end();
  }
}

void ProcessGroupSMDDP::at_end(std::function<void()> end) {
  std::lock_guard lock(mutex_);
  at_end_.push_back(std::move(end));
}

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
  auto limit_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
  if (auto device = device_.existing()) device->group().set_limit(limit_ns);
  group().set_timeout(limit_ns);
  fallback_.set_timeout(timeout);
}

c10d::ErrorType ProcessGroupSMDDP::getError() {
  auto group = group_if_any();
  if (!group) return c10d::ErrorType::SUCCESS;
  Status status = group->status();
  auto device = device_.existing();
  if (status && device) status = device->group().status();
  return error_type(status.code());
}

void ProcessGroupSMDDP::abort() {
  if (auto group = group_if_any()) {
    const std::string why = kAbortedByCaller + group->describe(rank_);
    if (auto device = device_.existing()) device->group().abort(why);
    messages_.abort(why);
    group->abort(why, true);
  }
  fallback_.abort();
}

void ProcessGroupSMDDP::shutdown() {
  release_groups();
  fallback_.shutdown();
}

void ProcessGroupSMDDP::eagerConnectSingleDevice(at::Device device) {
  group();  // throws if the group is gone
  if (device.is_cuda()) fallback_.connect(device);
}

std::shared_ptr<c10::Allocator> ProcessGroupSMDDP::getMemAllocator() {
  group();  // throws if the group is gone
  return fallback_.backend(c10::kCUDA).getMemAllocator();
}

at::Tensor ProcessGroupSMDDP::allocateTensor(long size, at::TensorOptions options) {
  return shared_empty({size}, options);
}

bool ProcessGroupSMDDP::supportsCoalescing() const { return at::hasCUDA(); }

void ProcessGroupSMDDP::startCoalescing() { coalesced_.open(); }

WorkPtr ProcessGroupSMDDP::endCoalescing() { return coalesced_.close(); }

// A CPU device has no index, unlike the CUDA devices that a group may serve as well.
bool ProcessGroupSMDDP::supportsTensorAlloc(c10::DeviceIndex device) { return device < 0; }

// --- smddp's own ---------------------------------------------------------------------------------

ProcessGroupSMDDP::Carrier ProcessGroupSMDDP::carrier(Collective collective, TensorRefs whole,
                                                      TensorRefs parts, const c10d::ReduceOp* op) {
  TensorRefList tensors = joined(parts, whole);
  if (const char* reason = op ? why_fallback(tensors, *op) : why_fallback(tensors)) return {reason};
  DeviceCollectives* device = nullptr;
  if (TorchDevice::concerns(tensors)) device = device_.of(tensors, group(), timeout_);
  if (tensors.empty()) return {};
  // Memory of the device that threads simulate can be carried by the CPU, too.
  if (device == nullptr && !tensors[0]->is_cpu()) return {device_.refusal()};
  c10::DeviceType type = tensors[0]->device().type();
  bool away = routes_.any(collective, type) && Fallback::takes(tensors, op) &&
              routes_.leads_away(collective, type, bytes_of(whole), !coalesced_.is_open());
  if (away) return {kRouted};
  if (device != nullptr && !device->can_be_recorded(collective) && TorchDevice::records(tensors))
    return {kRecorded};
  if (device == nullptr || !settings().check_first_use) return {nullptr, device};
  return {first_use_.objection(*device, collective, engine_, group()), device};
}

WorkPtr ProcessGroupSMDDP::count(WorkPtr on_device) {
  ++operations_;
  return coalesced_.note(std::move(on_device));
}

template <class CallOptions>
WorkPtr ProcessGroupSMDDP::submit(std::shared_ptr<TensorOperation> op, const CallOptions& opts,
                                  OpType type) {
  Group& core_group = group();
  if (operations_++ > 0 && !store_is_tidy_) tidy_store(core_group);
  if (opts.timeout != c10d::kUnsetTimeout && opts.timeout != timeout_ && opts.timeout.count() > 0) {
    op->timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(opts.timeout).count());
  }
  core_group.submit(op, settings().tuning, opts.asyncOp);
  // torch takes a synchronous call that returns no Work as done: this saves the Work and a wait() from
  // Python. (Only while a graph is traced, its inputs are registered with their Work.)
  if (!opts.asyncOp && !c10d::allow_inflight_collective_as_graph_input()) {
    await(engine_, *op, kNoTimeout);
    return nullptr;
  }
  return c10::make_intrusive<WorkSMDDP>(rank_, type, process_, std::move(op));
}

c10d::Backend& ProcessGroupSMDDP::fallback(const char* operation, TensorRefs tensors,
                                           const char* reason) {
  group();  // throws if the group is gone
  c10d::Backend& chosen = fallback_.take(operation, tensors, reason);
  if (!tensors.empty() && tensors[0]->is_cuda()) coalesced_.enter(chosen);
  return chosen;
}

template <class... Parameters, class... Arguments>
WorkPtr ProcessGroupSMDDP::forward(const char* operation, TensorRefs tensors, const char* reason,
                                   WorkPtr (c10d::Backend::*call)(Parameters...),
                                   Arguments&... arguments) {
  WorkPtr work = (fallback(operation, tensors, reason).*call)(arguments...);
  return coalesced_.note(work ? Fallback::note(std::move(work)) : nullptr);
}

template <class Call, class... Arguments>
WorkPtr ProcessGroupSMDDP::gather_all(TensorRefs outputs, TensorRefs inputs, bool list,
                                      const c10d::AllgatherOptions& opts, OpType type, Call call,
                                      Arguments&... arguments) {
  auto [reason, device] = carrier(Collective::kAllGather, outputs, inputs);
  if (reason != nullptr) return forward("all_gather", outputs, reason, call, arguments..., opts);
  require(!inputs.empty() && outputs.size() == inputs.size() * per_tensor(list),
          "all_gather needs as many outputs as inputs, and at least one");
  if (device == nullptr) return submit(gather_of(outputs, inputs, list, rank_, size_), opts, type);
  return count(device->gather(outputs, inputs, list, opts.timeout, type, opts.asyncOp));
}

template <class Call, class... Arguments>
WorkPtr ProcessGroupSMDDP::scatter_sums(TensorRefs outputs, TensorRefs inputs, bool list,
                                        const c10d::ReduceScatterOptions& opts, OpType type,
                                        Call call, Arguments&... arguments) {
  auto [reason, device] = carrier(Collective::kReduceScatter, inputs, outputs, &opts.reduceOp);
  if (reason != nullptr) return forward("reduce_scatter", inputs, reason, call, arguments..., opts);
  require(!outputs.empty() && inputs.size() == outputs.size() * per_tensor(list),
          "reduce_scatter needs as many inputs as outputs, and at least one");
  ReduceOp op = *reduction_of(opts.reduceOp);
  if (device == nullptr)
    return submit(scatter_of(outputs, inputs, list, op, rank_, size_), opts, type);
  return count(device->scatter(outputs, inputs, list, op, opts.timeout, type, opts.asyncOp));
}

template <class CallOptions>
WorkPtr ProcessGroupSMDDP::sum_all(Tensors& tensors, const CallOptions& opts, OpType type,
                                   WorkPtr (c10d::Backend::*call)(Tensors&, const CallOptions&)) {
  TensorRefList all = refs(tensors);
  auto [reason, device] = carrier(Collective::kAllReduce, all, {}, &opts.reduceOp);
  if (reason != nullptr) return forward("all_reduce", all, reason, call, tensors, opts);
  require(!all.empty(), "all_reduce needs a tensor");
  ReduceOp op = *reduction_of(opts.reduceOp);
  if (device == nullptr) return submit(sum_of(all, op, size_), opts, type);
  return count(device->reduce(all, op, opts.timeout, type, opts.asyncOp));
}

WorkPtr ProcessGroupSMDDP::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& opts) {
  const at::Tensor *to = &output, *from = &input;
  return gather_all(to, from, false, opts, OpType::_ALLGATHER_BASE, &Backend::_allgather_base,
                    output, input);
}

WorkPtr ProcessGroupSMDDP::allgather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  require_one_per_rank("all_gather needs one output", outputs, size_);
  return gather_all(refs(outputs), refs(inputs), true, opts, OpType::ALLGATHER, &Backend::allgather,
                    outputs, inputs);
}

WorkPtr ProcessGroupSMDDP::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& opts) {
  return gather_all(by_input(outputs, inputs.size()), refs(inputs), true, opts,
                    OpType::ALLGATHER_COALESCED, &Backend::allgather_coalesced, outputs, inputs);
}

WorkPtr ProcessGroupSMDDP::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  return gather_all(refs(outputs), refs(inputs), false, opts, OpType::COALESCED,
                    &Backend::allgather_into_tensor_coalesced, outputs, inputs);
}

WorkPtr ProcessGroupSMDDP::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) {
  const at::Tensor *to = &output, *from = &input;
  return scatter_sums(to, from, false, opts, OpType::_REDUCE_SCATTER_BASE,
                      &Backend::_reduce_scatter_base, output, input);
}

WorkPtr ProcessGroupSMDDP::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                          const c10d::ReduceScatterOptions& opts) {
  require_one_per_rank("reduce_scatter needs one input", inputs, size_);
  return scatter_sums(refs(outputs), refs(inputs), true, opts, OpType::REDUCE_SCATTER,
                      &Backend::reduce_scatter, outputs, inputs);
}

// torch 2.11 has no type of its own for it.
WorkPtr ProcessGroupSMDDP::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& opts) {
  return scatter_sums(refs(outputs), refs(inputs), false, opts, OpType::COALESCED,
                      &Backend::reduce_scatter_tensor_coalesced, outputs, inputs);
}

WorkPtr ProcessGroupSMDDP::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  GradientLabel label;
  return sum_all(tensors, opts, OpType::ALLREDUCE, &Backend::allreduce);
}

WorkPtr ProcessGroupSMDDP::allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& opts) {
  return sum_all(tensors, opts, OpType::ALLREDUCE_COALESCED, &Backend::allreduce_coalesced);
}

WorkPtr ProcessGroupSMDDP::barrier(const c10d::BarrierOptions& opts) {
  // As NCCL's barrier does: what the caller's stream holds is done as well.
  if (auto collectives = device_.existing()) {
    TorchDevice& device = collectives->device();
    if (Status s = device.device().synchronize(device.current()); !s) throw_status(s);
  }
  return submit(barrier_of(size_), opts, OpType::BARRIER);
}

WorkPtr ProcessGroupSMDDP::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  TensorRefList all = refs(tensors);
  if (const char* reason = why_not_on_host(all))
    return forward("broadcast", all, reason, &Backend::broadcast, tensors, opts);
  return submit(broadcast_of(all, opts.rootRank, rank_, size_), opts, OpType::BROADCAST);
}

WorkPtr ProcessGroupSMDDP::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  TensorRefList all = refs(tensors);
  if (const char* reason = why_not_on_host(all, &opts.reduceOp))
    return forward("reduce", all, reason, &Backend::reduce, tensors, opts);
  ReduceOp op = *reduction_of(opts.reduceOp);
  return submit(reduce_of(all, op, opts.rootRank, rank_, size_), opts, OpType::REDUCE);
}

WorkPtr ProcessGroupSMDDP::gather(TensorLists& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& opts) {
  TensorRefList to = refs(outputs), from = refs(inputs);
  if (const char* reason = why_not_paired(group().topology(), joined(from, to)))
    return forward("gather", from, reason, &Backend::gather, outputs, inputs, opts);
  return submit(gather_to_root_of(to, from, opts.rootRank, rank_, size_), opts, OpType::GATHER);
}

WorkPtr ProcessGroupSMDDP::scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ScatterOptions& opts) {
  TensorRefList to = refs(outputs), from = refs(inputs);
  if (const char* reason = why_not_paired(group().topology(), joined(to, from)))
    return forward("scatter", to, reason, &Backend::scatter, outputs, inputs, opts);
  return submit(scatter_from_root_of(to, from, opts.rootRank, rank_, size_), opts, OpType::SCATTER);
}

WorkPtr ProcessGroupSMDDP::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& opts) {
  const at::Tensor *to = &output, *from = &input;
  if (const char* reason = why_not_paired(group().topology(), joined(to, from)))
    return forward("all_to_all", from, reason, &Backend::alltoall_base, output, input,
                   output_splits, input_splits, opts);
  return submit(all_to_all_of(output, input, output_splits, input_splits, rank_, size_), opts,
                OpType::ALLTOALL_BASE);
}

WorkPtr ProcessGroupSMDDP::alltoall(Tensors& outputs, Tensors& inputs,
                                    const c10d::AllToAllOptions& opts) {
  TensorRefList to = refs(outputs), from = refs(inputs);
  if (const char* reason = why_not_paired(group().topology(), joined(from, to)))
    return forward("all_to_all", from, reason, &Backend::alltoall, outputs, inputs, opts);
  return submit(all_to_all_of(to, from, rank_, size_), opts, OpType::ALLTOALL);
}

WorkPtr ProcessGroupSMDDP::pass(Tensors& tensors, bool sends, std::optional<int> peer, int tag) {
  TensorRefList all = refs(tensors);
  if (const char* reason = why_not_on_host(all)) {
    if (!peer) return forward("recv", all, reason, &Backend::recvAnysource, tensors, tag);
    return forward(sends ? "send" : "recv", all, reason, sends ? &Backend::send : &Backend::recv,
                   tensors, *peer, tag);
  }
  require(all.size() == 1, sends ? "send takes one tensor" : "recv takes one tensor");
  require(!peer || (*peer >= 0 && *peer < size_ && *peer != rank_), [&] {
    return std::string(sends ? "send to" : "recv from") + " rank " + std::to_string(*peer) +
           (*peer == rank_ ? " of the group is of the calling rank itself"
                           : ", which the group does not have");
  });
  require(size_ > 1, "send and recv need a group of several ranks");
  auto message = message_of(*all[0], sends, tag);
  auto limit_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout_).count());
  messages_.submit(group(), message, peer, limit_ns);
  OpType type = sends ? OpType::SEND : peer ? OpType::RECV : OpType::RECVANYSOURCE;
  return coalesced_.note(c10::make_intrusive<WorkSMDDP>(rank_, type, process_, std::move(message)));
}

WorkPtr ProcessGroupSMDDP::send(Tensors& tensors, int to, int tag) {
  return pass(tensors, true, to, tag);
}

WorkPtr ProcessGroupSMDDP::recv(Tensors& tensors, int from, int tag) {
  return pass(tensors, false, from, tag);
}

WorkPtr ProcessGroupSMDDP::recvAnysource(Tensors& tensors, int tag) {
  return pass(tensors, false, std::nullopt, tag);
}

// --- the fallback's ------------------------------------------------------------------------------

WorkPtr ProcessGroupSMDDP::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return forward("all_reduce_sparse", refs(tensors), "smddp carries dense tensors only",
                 &Backend::allreduce, tensors, opts);
}

void ProcessGroupSMDDP::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  fallback("monitored_barrier", {}, kNotOurs).monitoredBarrier(opts, wait_all_ranks);
}

}  // namespace smddp
