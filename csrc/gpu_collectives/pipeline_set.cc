#include "gpu_collectives/pipeline_set.h"

#include <utility>

namespace smddp {

void PipelineSet::set_rail(std::unique_ptr<PinnedPipeline> pipeline) {
  rail_ = std::move(pipeline);
  any_ = true;
}

void PipelineSet::set_all(std::unique_ptr<PinnedPipeline> pipeline) {
  all_ = std::move(pipeline);
  any_ = true;
}

void PipelineSet::take(PipelineSet& other) {
  rail_ = std::move(other.rail_);
  all_ = std::move(other.all_);
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

void PipelineSet::abort(const std::string& reason) {
  if (rail_) rail_->abort(reason);
  if (all_) all_->abort(reason);
}

}  // namespace smddp
