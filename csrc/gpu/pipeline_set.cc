#include "gpu/pipeline_set.h"

#include <utility>

namespace smddp {

void PipelineSet::set_rail(std::unique_ptr<PinnedPipeline> pipeline) {
  rail_ = std::move(pipeline);
}

void PipelineSet::set_all(std::unique_ptr<PinnedPipeline> pipeline) { all_ = std::move(pipeline); }

void PipelineSet::take(PipelineSet& other) {
  rail_ = std::move(other.rail_);
  all_ = std::move(other.all_);
}

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
  for (const PinnedPipeline::Exchange& exchange : op.exchanges) {
    if (Status room = pipeline->reserve(exchange); !room) return room;
  }
  return {};
}

void PipelineSet::set_limit(uint64_t limit_ns) {
  if (rail_) rail_->set_limit(limit_ns);
  if (all_) all_->set_limit(limit_ns);
}

Status PipelineSet::status() const {
  Status known;
  if (rail_) known = rail_->status();
  if (known && all_) known = all_->status();
  return known;
}

std::vector<PinnedPipeline*> PipelineSet::all() const {
  std::vector<PinnedPipeline*> all;
  for (PinnedPipeline* each : {rail_.get(), all_.get()}) {
    if (each != nullptr) all.push_back(each);
  }
  return all;
}

}  // namespace smddp
