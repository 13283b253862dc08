// Who exchanges what with whom: pure index arithmetic over a topology, no buffers and no network.
#pragma once

#include <vector>

#include "topology/topology.h"

namespace smddp::pattern {

// Rail all-to-all. A rank's targets hold its rail on the other nodes, in an order rotated by node,
// so that in each step every node receives from exactly one other.
std::vector<Rank> targets(const Topology& topology, Rank rank);

// AllGather: the ranks of other nodes whose shard arrives from the network at `rank` (`rank` is
// their gateway), in the order in which they start to send.
std::vector<Rank> arrivals(const Topology& topology, Rank rank);

// ReduceScatter: the local rank that sums its node's contributions to `block`.
Rank reducer(const Topology& topology, int node, Rank block);

// Equal parts of `count` elements for AllReduce: first element of each rank's part, and one past
// the end of the last. The parts differ by at most one granule of `granule` elements.
std::vector<size_t> equal_parts(size_t count, int ranks, size_t granule);

}  // namespace smddp::pattern
