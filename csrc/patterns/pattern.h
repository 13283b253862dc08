// Who exchanges what with whom: pure index arithmetic over a topology, no buffers and no network.
#pragma once

#include <cstdint>
#include <vector>

#include "topology/topology.h"

namespace smddp::pattern {

enum class Pattern : uint8_t {
  kDirect,  // rail all-to-all: n-1 messages, one hop
  kLog,     // Bruck's: ceil(log2 n) messages, as many hops, the same bytes; equal nodes only
  kJoint,   // n-1 messages per node, each with all its shards; AllGather only
};

const char* name_of(Pattern pattern);
// The bit of a signature's options that says which pattern it is; 0 for kDirect.
uint8_t signature_option(Pattern pattern);

// What goes from one rank to another in a round: the shards of these ranks, end to end, as one run
// of bytes. Of an ordered pair of ranks there is at most one flow in a round.
struct Flow {
  Rank peer;
  std::vector<Rank> shards;
  int step;  // from 1 on; in one step a node sends to one other and receives from one
};

struct Flows {
  std::vector<Flow> in, out;
};

// AllGather, seen from `rank`; each in the order in which they start. A shard enters a node once.
//
// kDirect: the own shard to its gateway on each other node, rotated by node, so that in each step
// every node receives from exactly one other.
// kLog: step i of Bruck et al. (IEEE TPDS 8(11), 1997) over the nodes of a rail: to the node 2^i
// below go the shards of the up to 2^i nodes from the own one upwards. Needs nodes of equal size.
// kJoint: one rank of a node sends another node all of the node's shards, the same that receives that
// one's: nodes i apart talk through their i-th ranks, so that all have a part in it (the flat form of
// Bienz et al., A Locality-Aware Bruck Allgather, EuroMPI 2022).
//
// ReduceScatter is the mirror: `in` and `out` change places, the steps run from the last to the
// first, and a flow holds, per block, the sum of what the sender's side of the tree contributes.
Flows gather_flows(const Topology& topology, Rank rank, Pattern pattern);
bool equal_nodes(const Topology& topology);

// AllGather: the rank of `node` that has `shard` first, its own or from the network.
Rank entry(const Topology& topology, int node, Rank shard, Pattern pattern);

// ReduceScatter: the local rank that sums its node's contributions to `block`.
Rank reducer(const Topology& topology, int node, Rank block);

// Elements of an AllReduce's parts are cut at multiples of this: whole cache lines for every type.
inline constexpr size_t kGranule = 64;

// Equal parts of `count` elements for AllReduce: first element of each rank's part, and one past
// the end of the last. The parts differ by at most one granule of `granule` elements.
std::vector<size_t> equal_parts(size_t count, int ranks, size_t granule);

}  // namespace smddp::pattern
