#include "topology/topology.h"

#include <unistd.h>

#include <fstream>
#include <numeric>
#include <unordered_map>

#include "common/env.h"

namespace smddp {

Topology::Topology(const std::vector<std::string>& host_of_rank) {
  std::unordered_map<std::string, int> index;
  for (size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    int node = index.try_emplace(host_of_rank[rank], nodes()).first->second;
    if (node == nodes()) node_.emplace_back();
    std::vector<Rank>& members = node_[static_cast<size_t>(node)];
    node_of_.push_back(node);
    local_index_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<Rank>(rank));
  }
}

Rank Topology::gateway(Rank rank, int node) const {
  const std::vector<Rank>& members = this->node(node);
  return members[static_cast<size_t>(local_index(rank)) % members.size()];
}

std::vector<Rank> all_ranks(int ranks) {
  std::vector<Rank> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::string host_name() {
  std::string given = env::get("HOST_ID");
  if (!given.empty()) return given;
  char name[256] = {};
  if (gethostname(name, sizeof name - 1) != 0) return "unknown-host";
  return name;
}

std::vector<Rank> Topology::first_of_hosts() const {
  std::vector<Rank> firsts;
  for (const std::vector<Rank>& ranks : node_) firsts.push_back(ranks[0]);
  return firsts;
}

std::string host_identity() {
  std::string given = env::get("HOST_ID");
  if (!given.empty()) return given;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char pid_namespace[64] = {};
  if (readlink("/proc/self/ns/pid", pid_namespace, sizeof pid_namespace - 1) < 0)
    pid_namespace[0] = '\0';
  return host_name() + "/" + boot + "/" + pid_namespace;
}

std::string boot_id_of(const std::string& identity) {
  constexpr size_t kBytes = 36;
  size_t first = identity.find('/'), second = identity.find('/', first + 1);
  return second != identity.npos && second - first - 1 == kBytes
             ? identity.substr(first + 1, kBytes)
             : "";
}

}  // namespace smddp
