// How far a group is on this rank, for people who ask why a job hangs. Made by the group.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "common/types.h"
#include "peers/peer_tallies.h"

namespace smddp {

// A rank whose data an operation waits for, or that has still to take data.
struct AwaitedRank {
  Rank rank = 0;          // in the group
  uint64_t expected = 0;  // bytes from it; 0: not known
  uint64_t arrived = 0;
  uint64_t quiet_ns = 0;  // since something last moved between the two
};

// The oldest operation that is not over.
struct OldestOperation {
  uint64_t sequence = 0;
  Collective collective = Collective::kBarrier;
  std::string text;  // "all_gather(...) #3 of group 'g'"
  std::vector<AwaitedRank> awaited;
};

struct GroupState {
  std::string name;
  Rank rank = 0;
  std::vector<Rank> members;       // what sentences call each rank
  std::vector<std::string> hosts;  // of each rank
  std::vector<PeerTally> tallies;  // of each rank
  uint64_t submitted = 0, finished = 0;
  Status status;
  std::optional<OldestOperation> oldest;  // in a broken group: when it broke
};

}  // namespace smddp
