// How far a group is on this rank, for people who ask why a job hangs. Made by the group.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "common/types.h"
#include "flows/coding_choice.h"
#include "flows/peer_tallies.h"

namespace smddp {

// A rank whose data an operation waits for, or that has still to take data.
struct AwaitedRank {
  Rank rank = 0;          // in the group
  uint64_t expected = 0;  // bytes from it; 0: not known
  uint64_t arrived = 0;
  uint64_t quiet_ns = 0;  // since something last moved between the two
};

// The oldest operation that is not complete.
struct OldestOperation {
  uint64_t sequence = 0;
  Collective collective = Collective::kBarrier;
  std::string text;  // "all_gather(...) #3 of group 'g'"
  std::vector<AwaitedRank> awaited;
};

// What this rank knows of the way to another one.
struct Connection {
  enum class State : uint8_t {
    kNew,         // nothing was sent to it or came of it
    kUnanswered,  // something was sent to it, and nothing has come
    kConnected,   // messages of it have come, or it is of this host
    kSilent,      // it has not answered questions for `silent_ns`
    kStopped,     // its process, of this host, is stopped
    kLeft,        // it takes no part in the group any more: `why`
    kLost,        // the connection broke, or was given up: `why`
    kEnded        // its process has ended
  };
  Rank rank = 0;  // in the group
  State state = State::kNew;
  std::string why;
  uint64_t silent_ns = 0;
  std::optional<uint64_t> last_message_ns;  // how long ago it came; of another host's rank
  std::string path;                         // "shared memory", or the provider and its NICs
};

struct GroupState {
  std::string name;
  Rank rank = 0;
  std::vector<Rank> members;       // what sentences call each rank
  std::vector<std::string> hosts;  // of each rank
  std::vector<PeerTally> tallies;  // of each rank
  uint64_t submitted = 0, complete = 0;
  Status status;
  std::optional<OldestOperation> oldest;  // in a broken group: when it broke
  std::vector<Connection> connections;    // if asked for
  std::string network;                    // the model that operations between hosts follow
  std::string inside_host;                // which way bytes go in a group inside one host
  CodingAnswer coding;                    // the last one
};

}  // namespace smddp
