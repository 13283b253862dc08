// The pipelines of a device group: one among the ranks of this rank's rail, one among all ranks, each
// opened where it is needed. Used by DeviceGroup alone, which locks: a pipeline is added and taken away
// under both of the group's locks, and used under either.
#pragma once

#include <memory>
#include <vector>

#include "gpu/device_operation.h"
#include "gpu/pinned_pipeline.h"

namespace smddp {

struct PipelineSet {
  std::unique_ptr<PinnedPipeline> all, rail;  // the rail's goes first

  // The one that carries the operation's exchanges; nullptr if it has none, or if that is not open.
  PinnedPipeline* of(const DeviceOperation& op) const {
    return op.exchanges.empty() ? nullptr : op.among_all ? all.get() : rail.get();
  }
  // Makes room for the operation's exchanges. `recorded`: the operation is to be recorded in a graph.
  Status reserve(const DeviceOperation& op, bool recorded) const;
  Status status() const;  // of the first that is broken
  std::vector<PinnedPipeline*> open() const;
};

}  // namespace smddp
