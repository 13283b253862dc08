#include "schedule/pattern.h"

#include <algorithm>

namespace smddp::pattern {

std::vector<Rank> targets(const Topology& topology, Rank rank) {
  std::vector<Rank> order;
  int home = topology.node_of(rank);
  for (int step = 1; step < topology.nodes(); ++step) {
    order.push_back(topology.gateway(rank, (home + step) % topology.nodes()));
  }
  return order;
}

std::vector<Rank> arrivals(const Topology& topology, Rank rank) {
  std::vector<Rank> order;
  int home = topology.node_of(rank);
  for (int step = 1; step < topology.nodes(); ++step) {
    int from = (home + topology.nodes() - step) % topology.nodes();
    for (Rank source : topology.node(from)) {
      if (topology.gateway(source, home) == rank) order.push_back(source);
    }
  }
  return order;
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
