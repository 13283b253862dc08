// What the network between hosts is, by this process's endpoint: measured now (network/measurement.h), by a group of
// two hosts' first ranks, so that every provider is measured by the way that data takes later; or measured by an
// earlier job (network/cache.h). GroupBuilder calls it, and the torch module for people.
#pragma once

#include <string>
#include <vector>

#include "joining/group_options.h"
#include "joining/store.h"
#include "network/cache.h"
#include "progress/process.h"
#include "topology/topology.h"

namespace smddp {

// The network model as text_of() writes it; "" if this rank has no part in it, or the measurement failed.
// Waits for the pair's other rank two seconds, at most, and gives up if the group `store` is of has failed.
std::string measure_network(Process& process, Store& store, const Topology& topology, Rank rank,
                            const GroupOptions& options);

// Of a job with so many ranks on the hosts that `hosts` names, once for each rank.
NetworkCache cache_of(const std::vector<std::string>& hosts, const transport::Facts& network);
// For people: the model that an earlier job has measured, and when; "" if none has. Opens the endpoint.
Result<std::string> stored_network(Process& process, const std::vector<std::string>& hosts);

}  // namespace smddp
