// What the store serves when a group of many ranks is made: the exchange of real groups, over a store that
// counts. The ranks take their turns in one thread, so none waits. The command and the tests use it.
#pragma once

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "common/types.h"
#include "joining/rank_info.h"

namespace smddp::simulator {

struct StoreTraffic {
  uint64_t sets = 0;
  uint64_t values = 0, bytes = 0;  // served
  uint64_t most_values = 0;        // to the rank that reads most
  uint64_t keys_left = 0;          // once the group is made
};

// `sample`: what a rank of a simulated cluster publishes. The others' differ from it where real ones differ.
Result<StoreTraffic> count_start_up(int hosts, int ranks_per_host, const RankInfo& sample);
// Of a further group of the ranks `members`, in ascending order, whose processes know one another from the group of
// all ranks.
Result<StoreTraffic> count_further_group(int hosts, int ranks_per_host, const RankInfo& sample,
                                         const std::vector<Rank>& members);

}  // namespace smddp::simulator
