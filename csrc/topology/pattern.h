// Which rank sends which shards to which rank: pure index arithmetic over a topology. Knows no
// buffers and no network. Called by the algorithms, by groups and by the selector.
#pragma once

#include <cstdint>
#include <vector>

#include "topology/topology.h"

namespace smddp::pattern {

enum class Pattern : uint8_t {
  kDirect,  // rail all-to-all: n-1 messages, one hop
  kLog,    // Bruck's: ceil(log2 n) messages, as many hops, the same bytes; hosts of equal size only
  kJoint,  // n-1 messages per host, each with all its shards; AllGather only
};

const char* name_of(Pattern pattern);
// The bit of a signature's options that says which pattern it is; 0 for kDirect.
uint8_t signature_option(Pattern pattern);

// What one rank sends to another in a fragment: the shards of these ranks, end to end, as one run
// of bytes. A fragment has at most one flow for each ordered pair of ranks.
struct Flow {
  Rank peer;
  std::vector<Rank> shards;
  int step;  // from 1 on; in one step a host sends to one other host and receives from one
};

struct Flows {
  std::vector<Flow> in, out;
};

// The flows of an AllGather that `rank` sends and receives; each list in the order in which they
// start. A shard enters a host once. Of n hosts:
//
// - kDirect: a rank sends its own shard to its gateway on each other host. The order is rotated by
//   host, so that in each step every host receives from exactly one other host.
// - kLog: step i of Bruck et al. (IEEE TPDS 8(11), 1997) over the hosts of a rail: the host 2^i
//   below gets the shards of up to 2^i hosts, from the own host upwards. Needs hosts of equal size.
// - kJoint: one rank of a host sends all shards of the host to another host, and receives all
//   shards of that host. Hosts i apart exchange through their i-th ranks, so that all ranks take
//   part (the flat form of Bienz et al., A Locality-Aware Bruck Allgather, EuroMPI 2022).
//
// ReduceScatter is the mirror: `in` and `out` change places, the steps run from the last to the
// first, and a flow holds, per block, the sum of the contributions on the sender's side of the
// tree.
Flows gather_flows(const Topology& topology, Rank rank, Pattern pattern);
// The flows of an all-to-all: each rank sends a block to each rank of another host, the one with the
// receiver's number. In each step a host sends to one other host, and in each turn of a step each rank to
// another rank of it.
Flows pair_flows(const Topology& topology, Rank rank);
// The flows between the first ranks of all hosts, `rank` being one: each sends to each, in steps as of kDirect, what it
// has of its host. `shards` is the sender. All of these ranks are on one rail.
Flows leader_flows(const Topology& topology, Rank rank);
// The ranks of groups up to this size that span hosts are connected each to each. In a larger group only those
// of a rail are, and there are no pair_flows().
inline constexpr int kPairedRanks = 256;
inline bool pairs_ranks(const Topology& topology) {
  return topology.nodes() == 1 || topology.ranks() <= kPairedRanks;
}
// True if all hosts have the same number of ranks.
bool equal_nodes(const Topology& topology);

// AllGather: the rank of `node` that has `shard` first, because it is its own or comes from the
// network.
Rank entry(const Topology& topology, int node, Rank shard, Pattern pattern);

// ReduceScatter: the rank of `node` that sums the contributions of its host to `block`.
Rank reducer(const Topology& topology, int node, Rank block);

// The parts of an AllReduce begin at multiples of this many elements: whole cache lines for every
// type.
inline constexpr size_t kGranule = 64;

// Equal parts of `count` elements for AllReduce: the first element of each rank's part, then one
// past the end of the last part. The parts differ by at most one granule of `granule` elements.
std::vector<size_t> equal_parts(size_t count, int ranks, size_t granule);

}  // namespace smddp::pattern
