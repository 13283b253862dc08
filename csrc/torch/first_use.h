// Compares the first collective of each kind and path of a group on a device with its known result, before
// the caller's own runs: hardware that this package has not met may move or add wrong bytes. Used by
// ProcessGroupSMDDP alone.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "torch/device_collectives.h"

namespace smddp {

// The names of paths are literals.
using CollectivePath = std::pair<Collective, std::string_view>;

class FirstUse {
 public:
  // Why `by` must not carry `collective` in `group`; nullptr: its results are right. The first call for a
  // collective and the path that the settings give it is a call of all ranks, which all get the same answer.
  // While the caller's stream records a graph nothing is compared, and the next call does.
  const char* objection(DeviceCollectives& by, Collective collective, Engine& engine, Group& group);

 private:
  std::mutex mutex_;                             // held while it compares
  std::map<CollectivePath, std::string> known_;  // empty: no objection
};

}  // namespace smddp
