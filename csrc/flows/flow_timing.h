// What the flows to a rank tell of the ranks that send them: when each has started the operation, and how fast
// its bytes come. Must not know when a flow may send. FragmentFlows and Fragment call it.
#pragma once

#include <atomic>
#include <cstdint>

#include "flows/flow.h"
#include "flows/peer_tallies.h"
#include "flows/remote_peers.h"
#include "topology/members.h"
#include "transport/wire.h"

namespace smddp {

class FlowTiming {
 public:
  // `waited_from_ns`: the operation's. `counts`: how fast bytes come says something of their sender and its link,
  // as it does not wait for others' bytes meanwhile.
  FlowTiming(const Members& members, PeerTallies& tallies,
             const std::atomic<uint64_t>& waited_from_ns, bool counts)
      : members_(members), tallies_(tallies), waited_from_ns_(waited_from_ns), counts_(counts) {}

  // Bytes behind the eager prefix have come. Reads the clock at the first of them and at the last.
  void on_bytes(ReceiveFlow& receive) const;

  // Awaits the start of fragment `seq` on each rank that sends to this one.
  static void await(Starts& starts, const FlowList<ReceiveFlow>& receives,
                    const RemotePeers& remote, uint64_t seq);
  // Whether a rank, whose first message of the fragment is a `type`, sent it as soon as it had started.
  // `receive`: the flow from it among `receives`, or nullptr.
  bool starts_by_itself(const FlowList<ReceiveFlow>& receives, const ReceiveFlow* receive,
                        wire::Type type, Collective collective) const;

 private:
  const Members& members_;
  PeerTallies& tallies_;
  const std::atomic<uint64_t>& waited_from_ns_;
  const bool counts_;
};

}  // namespace smddp
