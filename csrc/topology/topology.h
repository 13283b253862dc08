// Who shares a host with whom. Pure data, built from the host identities that the ranks exchanged.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/types.h"

namespace smddp {

// Nodes are numbered by their lowest rank, the ranks of a node by rank. Unequal nodes and ranks
// that are dealt out in any order are fine.
class Topology {
 public:
  Topology() = default;
  explicit Topology(const std::vector<std::string>& host_of_rank);

  int ranks() const { return static_cast<int>(node_of_.size()); }
  int nodes() const { return static_cast<int>(node_.size()); }
  int node_of(Rank rank) const { return node_of_[static_cast<size_t>(rank)]; }
  // Position of `rank` among the ranks of its node.
  int local_index(Rank rank) const { return local_index_[static_cast<size_t>(rank)]; }
  const std::vector<Rank>& node(int node) const { return node_[static_cast<size_t>(node)]; }
  bool same_node(Rank a, Rank b) const { return node_of(a) == node_of(b); }
  // The rail's end on `node`: the rank there that exchanges with `rank` over the network. Equal
  // local index where the node has one, else the index wraps.
  Rank gateway(Rank rank, int node) const;

 private:
  std::vector<std::vector<Rank>> node_;
  std::vector<int> node_of_;
  std::vector<int> local_index_;
};

// SMDDP_HOST_ID, or else hostname, boot id and pid namespace: ranks that compare equal can open
// each other's /proc/<pid>/fd and so share memory. Ranks in different containers count as different
// hosts.
std::string host_identity();
std::string host_name();

}  // namespace smddp
