// Who the ranks of a group are: their number, their hosts, and what sentences for the user call them.
// Fixed once the group is made. Must not know how ranks are reached. Every part of a group reads it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "topology/topology.h"

namespace smddp {

class Members {
 public:
  // `host_names`: by rank. `called`: the number that sentences give each rank; empty: its rank here.
  Members(Rank rank, Topology topology, std::string group_name, std::vector<std::string> host_names,
          std::vector<Rank> called)
      : rank_(rank),
        topology_(std::move(topology)),
        group_name_(std::move(group_name)),
        host_names_(std::move(host_names)),
        called_(std::move(called)) {}

  Rank rank() const { return rank_; }  // this process's
  int ranks() const { return topology_.ranks(); }
  const Topology& topology() const { return topology_; }
  const std::string& group_name() const { return group_name_; }
  Rank called(Rank rank) const {
    return called_.empty() ? rank : called_[static_cast<size_t>(rank)];
  }
  const std::string& host(Rank rank) const { return host_names_[static_cast<size_t>(rank)]; }
  std::string describe(Rank rank) const {  // "rank 3 (host b)"
    if (rank < 0 || rank >= ranks()) return "rank " + std::to_string(rank);
    return "rank " + std::to_string(called(rank)) + " (" + host(rank) + ")";
  }

 private:
  Rank rank_;
  Topology topology_;
  std::string group_name_;
  std::vector<std::string> host_names_;
  std::vector<Rank> called_;
};

}  // namespace smddp
