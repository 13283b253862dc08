// ProcessGroupSMDDP's operations that the fallback carries out, each counted under its own name.
#include "torch/process_group.h"
#include "torch/runtime.h"
#include "torch/tensors.h"

namespace smddp {
namespace {

constexpr char kNotOurs[] =
    "smddp owns all_gather, reduce_scatter, all_reduce and barrier, and on CPUs broadcast, reduce, "
    "gather, scatter and all_to_all";

}  // namespace

c10d::Backend& ProcessGroupSMDDP::fallback(const char* operation, TensorRefs tensors,
                                           const char* reason) {
  group();  // throws if the group is gone
  c10::DeviceType device = tensors.empty() ? c10::kCPU : tensors[0]->device().type();
  c10d::Backend& chosen = fallback_.take(operation, device, bytes_of(tensors), reason);
  if (device == c10::kCUDA) coalesced_.enter(chosen);
  return chosen;
}

WorkPtr ProcessGroupSMDDP::forwarded(WorkPtr work) {
  if (work) work = Fallback::note(std::move(work));
  return coalesced_.note(std::move(work));
}

bool ProcessGroupSMDDP::supportsCoalescing() const { return at::hasCUDA(); }

void ProcessGroupSMDDP::startCoalescing() { coalesced_.open(); }

WorkPtr ProcessGroupSMDDP::endCoalescing() { return coalesced_.close(); }

WorkPtr ProcessGroupSMDDP::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return forwarded(fallback("all_reduce_sparse", refs(tensors), "smddp carries dense tensors only")
                       .allreduce(tensors, opts));
}

WorkPtr ProcessGroupSMDDP::send(Tensors& tensors, int to, int tag) {
  return forwarded(fallback("send", refs(tensors), kNotOurs).send(tensors, to, tag));
}

WorkPtr ProcessGroupSMDDP::recv(Tensors& tensors, int from, int tag) {
  return forwarded(fallback("recv", refs(tensors), kNotOurs).recv(tensors, from, tag));
}

WorkPtr ProcessGroupSMDDP::recvAnysource(Tensors& tensors, int tag) {
  return forwarded(fallback("recv", refs(tensors), kNotOurs).recvAnysource(tensors, tag));
}

void ProcessGroupSMDDP::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  fallback("monitored_barrier", {}, kNotOurs).monitoredBarrier(opts, wait_all_ranks);
}

}  // namespace smddp
