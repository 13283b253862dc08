#include "topology/pattern.h"

#include <algorithm>

#include "common/signature.h"

namespace smddp::pattern {
namespace {

Flows direct(const Topology& topology, Rank rank) {
  Flows flows;
  int home = topology.node_of(rank);
  int nodes = topology.nodes();
  for (int step = 1; step < nodes; ++step) {
    flows.out.push_back({topology.gateway(rank, (home + step) % nodes), {rank}, step});
    for (Rank source : topology.node((home + nodes - step) % nodes)) {
      if (topology.gateway(source, home) == rank) flows.in.push_back({source, {source}, step});
    }
  }
  return flows;
}

Flows logarithmic(const Topology& topology, Rank rank) {
  Flows flows;
  int home = topology.node_of(rank);
  int nodes = topology.nodes();
  auto shards = [&](int from, int count) {
    std::vector<Rank> out;
    for (int i = 0; i < count; ++i) out.push_back(topology.gateway(rank, (from + i) % nodes));
    return out;
  };
  int step = 0;
  for (int distance = 1; distance < nodes; distance *= 2) {
    ++step;
    int count = std::min(distance, nodes - distance);
    int below = (home + nodes - distance) % nodes, above = (home + distance) % nodes;
    flows.out.push_back({topology.gateway(rank, below), shards(home, count), step});
    flows.in.push_back({topology.gateway(rank, above), shards(above, count), step});
  }
  return flows;
}

// The rank of `node` that exchanges all shards with `other`. The rank at the other end has the same
// local index, so that the two are on one rail.
Rank joint_gateway(const Topology& topology, int node, int other) {
  int apart = std::abs(node - other);
  auto distance = static_cast<size_t>(std::min(apart, topology.nodes() - apart));
  const std::vector<Rank>& ranks = topology.node(node);
  return ranks[(distance - 1) % std::min(ranks.size(), topology.node(other).size())];
}

Flows joint(const Topology& topology, Rank rank) {
  Flows flows;
  int home = topology.node_of(rank);
  int nodes = topology.nodes();
  for (int step = 1; step < nodes; ++step) {
    int above = (home + step) % nodes, below = (home + nodes - step) % nodes;
    if (joint_gateway(topology, home, above) == rank)
      flows.out.push_back({joint_gateway(topology, above, home), topology.node(home), step});
    if (joint_gateway(topology, home, below) == rank)
      flows.in.push_back({joint_gateway(topology, below, home), topology.node(below), step});
  }
  return flows;
}

}  // namespace

const char* name_of(Pattern pattern) {
  return pattern == Pattern::kLog ? "log" : pattern == Pattern::kJoint ? "joint" : "direct";
}

uint8_t signature_option(Pattern pattern) {
  return pattern == Pattern::kLog ? kLogPattern : pattern == Pattern::kJoint ? kJointPattern : 0;
}

Flows gather_flows(const Topology& topology, Rank rank, Pattern pattern) {
  if (pattern == Pattern::kLog) return logarithmic(topology, rank);
  return pattern == Pattern::kJoint ? joint(topology, rank) : direct(topology, rank);
}

Flows leader_flows(const Topology& topology, Rank rank) {
  Flows flows;
  int home = topology.node_of(rank), nodes = topology.nodes();
  for (int step = 1; step < nodes; ++step) {
    Rank source = topology.node((home + nodes - step) % nodes)[0];
    flows.out.push_back({topology.node((home + step) % nodes)[0], {rank}, step});
    flows.in.push_back({source, {source}, step});
  }
  return flows;
}

Flows pair_flows(const Topology& topology, Rank rank) {
  Flows flows;
  int home = topology.node_of(rank), nodes = topology.nodes();
  auto own = static_cast<size_t>(topology.local_index(rank));
  size_t here = topology.node(home).size();
  for (int step = 1; step < nodes; ++step) {
    const std::vector<Rank>& above = topology.node((home + step) % nodes);
    const std::vector<Rank>& below = topology.node((home + nodes - step) % nodes);
    for (size_t turn = 0; turn < above.size(); ++turn) {
      Rank target = above[(own + turn) % above.size()];
      flows.out.push_back({target, {rank}, step});
    }
    // The sender with local index i sends to this rank in the turn in which i + turn is this rank's own.
    for (size_t turn = 0; turn < here; ++turn) {
      for (size_t i = 0; i < below.size(); ++i) {
        if ((i + turn) % here == own) flows.in.push_back({below[i], {below[i]}, step});
      }
    }
  }
  return flows;
}

Rank entry(const Topology& topology, int node, Rank shard, Pattern pattern) {
  int home = topology.node_of(shard);
  bool jointly = pattern == Pattern::kJoint && home != node;
  return jointly ? joint_gateway(topology, node, home) : reducer(topology, node, shard);
}

bool equal_nodes(const Topology& topology) {
  for (int node = 1; node < topology.nodes(); ++node) {
    if (topology.node(node).size() != topology.node(0).size()) return false;
  }
  return true;
}

Rank reducer(const Topology& topology, int node, Rank block) {
  return topology.node_of(block) == node ? block : topology.gateway(block, node);
}

std::vector<size_t> equal_parts(size_t count, int ranks, size_t granule) {
  size_t granules = (count + granule - 1) / granule;
  auto n = static_cast<size_t>(ranks);
  std::vector<size_t> starts;
  for (size_t r = 0; r <= n; ++r) starts.push_back(std::min(count, granules * r / n * granule));
  return starts;
}

}  // namespace smddp::pattern
