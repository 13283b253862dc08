// Which ranks of other hosts a group waits for, for how long nothing has come of each, and what became of
// them: ended, silent, connection broken, or out of the group. Must not know how operations move their
// bytes, nor how processes are asked. The FailureDetector calls it, under the engine's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flows/remote_peers.h"
#include "group/fragment_queue.h"
#include "group/group_state.h"
#include "liveness/liveness.h"
#include "topology/members.h"

namespace smddp {

// What a group needs to ask whether its remote ranks live.
struct LivenessOfRanks {
  liveness::Liveness* service = nullptr;  // nullptr: it can't ask
  // In the order of RemotePeers::ranks(); std::nullopt: that rank can't be asked.
  std::vector<std::optional<liveness::Process>> processes;
};

class RemoteWatch {
 public:
  // `silence_ns`: 0 for no limit.
  RemoteWatch(const JobKey& key, const Members& members, RemotePeers& remote,
              const FragmentQueue& fragments, LivenessOfRanks liveness, uint64_t silence_ns);

  // Something could not be sent to `peer`. kUnavailable: by a limit of this process. Otherwise look() finds
  // out whether the peer's process has ended.
  void on_lost(transport::Peer peer, const Status& why);
  // `source` says that all its bytes for this rank in fragment `seq` have left.
  void on_sent_all(Rank source, uint64_t seq);
  // True if look() has to be called though the group has nothing in flight.
  bool has_broken() const { return broken_ > 0; }
  // Not ok: why the group can't go on; kAborted: the reason of a remote rank that has left it from a fragment on that
  // is needed here. Cheap if called more often than needed. `one_gave_up`: a rank has given the group up, so that those
  // that are waited for may have, too, and can't tell: they are asked at once.
  Status look(uint64_t now, bool one_gave_up = false);
  // Not ok if `rank`, of another host, has ended, is silent, or has left the group, whatever is under way.
  Status ask_now(Rank rank, uint64_t now);
  // Once the group is broken, or is left: finds the ranks that do not answer, or have lost this one and so can't tell it
  // anything (RemotePeers::expect_nothing()).
  // `or_left`: those as well that have left the group.
  void find_silent(uint64_t now, bool or_left = false) noexcept;
  // Since when nothing has moved between this rank and a remote one that it waits for; 0: it does not.
  uint64_t quiet_since_ns(Rank rank) const {
    uint32_t i = by_rank_[static_cast<size_t>(rank)];
    return i < remotes_.size() && remotes_[i].rank == rank ? remotes_[i].quiet_since_ns : 0;
  }
  // What is known of the connection to a remote rank. Asks nothing.
  Connection connection(Rank rank, uint64_t now) const;
  // Tells the peers that ask that this rank takes no part in the group from fragment `from` on.
  void leave(uint64_t from, const std::string& reason) noexcept;

 private:
  struct Remote {
    Rank rank = 0;
    bool awaited = false;
    uint64_t amount = 0;  // as FragmentFlows::for_each_awaited(), over all fragments in flight
    uint64_t last_amount = 0;
    uint64_t quiet_since_ns = 0;           // 0: not awaited
    uint64_t oldest_lacking = UINT64_MAX;  // the first fragment that lacks bytes of it
    uint64_t sent_all = UINT64_MAX;        // fragment of which it says that all has left
    int said_sent_all = 0;                 // how often, since anything of it last came
    uint64_t broken_ns = 0;                // 0: its connection works
    Status why_broken;
    std::string why_lost;       // once the group has given it up
    uint64_t lost_us_ns = 0;    // when find_silent() heard that it has given this rank up
    liveness::Verdict verdict;  // the latest, if nothing has moved since
    uint64_t verdict_ns = 0;    // when it was given
  };

  void find_awaited(uint64_t now);
  Status judge(size_t i, uint64_t now, bool one_gave_up, bool anew);
  const liveness::Verdict& ask(size_t i, uint64_t now, bool anew = false);
  Status lost(Remote& remote, const std::string& what);
  Status at_limit(const Remote& remote);
  std::string ended(size_t i) const;
  std::string silent(uint64_t silent_ns) const;
  std::string during() const;

  const JobKey key_;
  const Members& members_;
  RemotePeers& remote_;
  const FragmentQueue& fragments_;
  const LivenessOfRanks liveness_;
  const uint64_t silence_ns_;
  std::vector<Remote> remotes_;    // in the order of RemotePeers::ranks()
  std::vector<uint32_t> by_rank_;  // where in remotes_
  int broken_ = 0;
  bool asked_anew_ = false;  // since a rank gave the group up
  uint64_t next_look_ns_ = 0;
};

}  // namespace smddp
