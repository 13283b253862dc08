// Which ranks share a host: pure data, built from the host identities that the ranks exchanged.
// Knows no buffers and no network. Called by groups, patterns and the selector.
//
// In the code's names a node is a host: the ranks whose host identities are equal.
#pragma once

#include <string>
#include <vector>

#include "common/types.h"

namespace smddp {

// Hosts are numbered in the order of their lowest rank, the ranks of a host in the order of rank.
// Hosts may have different numbers of ranks, and ranks may be spread over hosts in any order.
class Topology {
 public:
  Topology() = default;
  explicit Topology(const std::vector<std::string>& host_of_rank);

  int ranks() const { return static_cast<int>(node_of_.size()); }
  int nodes() const { return static_cast<int>(node_.size()); }
  int node_of(Rank rank) const { return node_of_[static_cast<size_t>(rank)]; }
  // Position of `rank` among the ranks of its host.
  int local_index(Rank rank) const { return local_index_[static_cast<size_t>(rank)]; }
  // The ranks of a host.
  const std::vector<Rank>& node(int node) const { return node_[static_cast<size_t>(node)]; }
  // The first rank of each host.
  std::vector<Rank> first_of_hosts() const;
  // The rank of host `node` that exchanges data with `rank` over the network: the other end of the
  // rail. It has the same local index; if the host has fewer ranks, the index wraps.
  Rank gateway(Rank rank, int node) const;

 private:
  std::vector<std::vector<Rank>> node_;
  std::vector<int> node_of_;
  std::vector<int> local_index_;
};

std::vector<Rank> all_ranks(int ranks);

// SMDDP_HOST_ID; if it is not set, hostname, boot id and pid namespace: ranks with equal identities
// can open each other's /proc/<pid>/fd and so share memory. Ranks in different containers count as
// ranks of different hosts.
std::string host_identity();
// The boot id in such an identity: it tells machines apart. Empty if it holds none.
std::string boot_id_of(const std::string& identity);
std::string host_name();

}  // namespace smddp
