#include "flows/flow_timing.h"

#include <algorithm>

#include "common/clock.h"

namespace smddp {

void FlowTiming::on_bytes(ReceiveFlow& receive) const {
  if (!counts_) return;
  if (receive.first_ns == 0) {
    receive.first_ns = now_ns();
    receive.first_bytes = receive.coverage.total();
  } else if (receive.coverage.complete()) {
    uint64_t now = now_ns(), waited_from = waited_from_ns_.load(std::memory_order_relaxed);
    PeerTally& tally = tallies_.of(receive.source);
    tally.flow_bytes += receive.run.bytes() - receive.first_bytes;
    tally.flow_ns += now - receive.first_ns;
    if (waited_from != 0)
      tally.flow_waited_ns += now - std::min(now, std::max(receive.first_ns, waited_from));
  }
}

void FlowTiming::await(Starts& starts, const FlowList<ReceiveFlow>& receives,
                       const RemotePeers& remote, uint64_t seq) {
  for (const ReceiveFlow& receive : receives) starts.await(receive.source);
  for (const ReceiveFlow& receive : receives) {
    bool early = remote.is_known_to_have_started(receive.source, seq);
    if (early && starts.is_unseen(receive.source)) starts.seen(receive.source, 0);
  }
}

// READYs and questions leave at the start of a fragment. Data of a later step may wait for that of an earlier
// one, and a sum for the other ranks of the sender's host.
bool FlowTiming::starts_by_itself(const FlowList<ReceiveFlow>& receives, const ReceiveFlow* receive,
                                  wire::Type type, Collective collective) const {
  if (type != wire::Type::kData && type != wire::Type::kWritten) return true;
  const Topology& topology = members_.topology();
  // The hosts of a tree pass on what comes from the root.
  if (collective == Collective::kBroadcast && topology.nodes() > 2) return false;
  bool moves = collective == Collective::kAllGather || pairwise(collective);
  if (!moves && topology.ranks() > topology.nodes()) return false;
  return receive != nullptr && receive->step == receives[0].step;
}

}  // namespace smddp
