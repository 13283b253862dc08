// Finds the flow from or to a rank among the flows of a fragment, which has at most one for each rank. Made
// once all flows are there. FragmentFlows asks it for each message that arrives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/types.h"

namespace smddp {

class FlowIndex {
 public:
  // `rank_of(flow)`: the other end of each of `flows`.
  template <class Flows, class RankOf>
  void make(const Flows& flows, RankOf&& rank_of) {
    entries_.reserve(flows.size());
    for (size_t i = 0; i < flows.size(); ++i)
      entries_.emplace_back(rank_of(flows[i]), static_cast<uint32_t>(i));
    std::sort(entries_.begin(), entries_.end());
  }
  // The flow of `rank` among `flows`, those that make() was called with; nullptr: there is none.
  template <class Flows>
  auto* in(Flows& flows, Rank rank) const {
    auto at = std::lower_bound(entries_.begin(), entries_.end(), std::pair(rank, uint32_t{0}));
    return at != entries_.end() && at->first == rank ? &flows[at->second] : nullptr;
  }

 private:
  std::vector<std::pair<Rank, uint32_t>> entries_;  // sorted
};

}  // namespace smddp
