#include "gpu/pipeline_set.h"

namespace smddp {

Status PipelineSet::reserve(const DeviceOperation& op, bool recorded) const {
  if (op.exchanges.empty()) return {};
  if (recorded) {
    return {Code::kInvalid,
            "a collective that goes through the CPU can't be recorded in a CUDA graph: one between "
            "hosts, or a sum with reduce_on \"cpu\"; call it outside of the graph"};
  }
  PinnedPipeline* pipeline = of(op);
  if (pipeline == nullptr)
    return {Code::kInternal, "an operation needs a pipeline between ranks that was not opened"};
  for (const DeviceExchange& exchange : op.exchanges) {
    if (Status room = pipeline->reserve(exchange); !room) return room;
  }
  return {};
}

std::vector<PinnedPipeline*> PipelineSet::open() const {
  std::vector<PinnedPipeline*> open;
  for (PinnedPipeline* each : {rail.get(), all.get()}) {
    if (each != nullptr) open.push_back(each);
  }
  return open;
}

Status PipelineSet::status() const {
  for (const PinnedPipeline* each : open()) {
    if (Status known = each->status(); !known) return known;
  }
  return {};
}

}  // namespace smddp
