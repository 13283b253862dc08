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
  // By rank: the name of its host, and the number that sentences give it, its rank in the whole job.
  Members(Rank rank, Topology topology, std::string group_name, std::vector<std::string> host_names,
          std::vector<Rank> numbers)
      : rank_(rank),
        topology_(std::move(topology)),
        group_name_(std::move(group_name)),
        host_names_(std::move(host_names)),
        numbers_(std::move(numbers)) {}

  Rank rank() const { return rank_; }  // this process's
  int ranks() const { return topology_.ranks(); }
  const Topology& topology() const { return topology_; }
  const std::string& group_name() const { return group_name_; }
  Rank number_of(Rank rank) const { return numbers_[static_cast<size_t>(rank)]; }
  const std::string& host(Rank rank) const { return host_names_[static_cast<size_t>(rank)]; }
  std::string describe(Rank rank) const {  // "rank 3 (host b)"
    if (rank < 0 || rank >= ranks()) return "rank " + std::to_string(rank);
    return "rank " + std::to_string(number_of(rank)) + " (" + host(rank) + ")";
  }

 private:
  Rank rank_;
  Topology topology_;
  std::string group_name_;
  std::vector<std::string> host_names_;
  std::vector<Rank> numbers_;
};

}  // namespace smddp
