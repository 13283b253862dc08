// ProcessGroupSMDDP's operations that the fallback carries out, each counted under its own name.
#include "torch/process_group.h"
#include "torch/runtime.h"
#include "torch/tensors.h"

namespace smddp {
namespace {

using c10d::Work;

constexpr char kNotOurs[] = "smddp owns all_gather, reduce_scatter, all_reduce and barrier";

}  // namespace

c10d::Backend& ProcessGroupSMDDP::fallback(const char* operation, TensorRefs tensors,
                                           const char* reason) {
  group();  // throws if the group is gone
  c10::DeviceType device = tensors.empty() ? c10::kCPU : tensors[0]->device().type();
  c10d::Backend& chosen = fallback_.take(operation, device, bytes_of(tensors), reason);
  if (device == c10::kCUDA) coalesced_.enter(chosen);
  return chosen;
}

intrusive_ptr<Work> ProcessGroupSMDDP::forwarded(intrusive_ptr<Work> work) {
  if (work) work = Fallback::note(std::move(work));
  return coalesced_.note(std::move(work));
}

bool ProcessGroupSMDDP::supportsCoalescing() const { return at::hasCUDA(); }

void ProcessGroupSMDDP::startCoalescing() { coalesced_.open(); }

intrusive_ptr<Work> ProcessGroupSMDDP::endCoalescing() { return coalesced_.close(); }

intrusive_ptr<Work> ProcessGroupSMDDP::allreduce_sparse(Tensors& tensors,
                                                        const c10d::AllreduceOptions& opts) {
  return forwarded(fallback("all_reduce_sparse", refs(tensors), "smddp carries dense tensors only")
                       .allreduce(tensors, opts));
}

intrusive_ptr<Work> ProcessGroupSMDDP::broadcast(Tensors& tensors,
                                                 const c10d::BroadcastOptions& opts) {
  return forwarded(fallback("broadcast", refs(tensors), kNotOurs).broadcast(tensors, opts));
}

intrusive_ptr<Work> ProcessGroupSMDDP::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return forwarded(fallback("reduce", refs(tensors), kNotOurs).reduce(tensors, opts));
}

intrusive_ptr<Work> ProcessGroupSMDDP::gather(TensorLists& outputs, Tensors& inputs,
                                              const c10d::GatherOptions& opts) {
  return forwarded(fallback("gather", refs(inputs), kNotOurs).gather(outputs, inputs, opts));
}

intrusive_ptr<Work> ProcessGroupSMDDP::scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ScatterOptions& opts) {
  return forwarded(fallback("scatter", refs(outputs), kNotOurs).scatter(outputs, inputs, opts));
}

intrusive_ptr<Work> ProcessGroupSMDDP::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                     std::vector<int64_t>& output_splits,
                                                     std::vector<int64_t>& input_splits,
                                                     const c10d::AllToAllOptions& opts) {
  return forwarded(fallback("all_to_all", &input, kNotOurs)
                       .alltoall_base(output, input, output_splits, input_splits, opts));
}

intrusive_ptr<Work> ProcessGroupSMDDP::alltoall(Tensors& outputs, Tensors& inputs,
                                                const c10d::AllToAllOptions& opts) {
  return forwarded(fallback("all_to_all", refs(inputs), kNotOurs).alltoall(outputs, inputs, opts));
}

intrusive_ptr<Work> ProcessGroupSMDDP::send(Tensors& tensors, int to, int tag) {
  return forwarded(fallback("send", refs(tensors), kNotOurs).send(tensors, to, tag));
}

intrusive_ptr<Work> ProcessGroupSMDDP::recv(Tensors& tensors, int from, int tag) {
  return forwarded(fallback("recv", refs(tensors), kNotOurs).recv(tensors, from, tag));
}

intrusive_ptr<Work> ProcessGroupSMDDP::recvAnysource(Tensors& tensors, int tag) {
  return forwarded(fallback("recv", refs(tensors), kNotOurs).recvAnysource(tensors, tag));
}

void ProcessGroupSMDDP::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  fallback("monitored_barrier", {}, kNotOurs).monitoredBarrier(opts, wait_all_ranks);
}

}  // namespace smddp
