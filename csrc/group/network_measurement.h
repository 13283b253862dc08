// Measures the network between hosts while a group is made: a few pairs of hosts exchange bytes, each pair in a
// group of its own of the two hosts' first ranks. So the cost does not grow with the number of hosts, and every
// provider is measured by the way that data takes later. Must not know how the results are exchanged.
// GroupBuilder calls it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "joining/store.h"
#include "collectives/selector.h"
#include "group/group.h"
#include "progress/engine.h"
#include "topology/topology.h"

namespace smddp {

// For how long a pair measures, at the most, once both ranks are there. A longer measurement was disturbed and
// counts for nothing.
inline constexpr uint64_t kMeasureNs = 250'000'000;
// The most pairs of hosts that measure, at the same time.
inline constexpr int kMeasuringPairs = 8;

// The pair of `rank`, the smaller first; std::nullopt if it does not measure. Hosts of a pair are half of all
// hosts apart, as neighbours often share a switch.
std::optional<std::pair<Rank, Rank>> measuring_pair(const Topology& topology, Rank rank);

// The network model as text_of() writes it; "" if this rank has no part in it, or the measurement failed.
// Waits for the pair's other rank two seconds, at most, and gives up if the group `store` is of has failed.
std::string measure_network(Engine& engine, Store& store, const Topology& topology, Rank rank,
                            const Group::Options& options);

// One model of those that ranks have measured, with the median of each number, to two digits. "" entries count
// for nothing; "" if there is no other.
std::string agree_on_measurements(const std::vector<std::string>& measured);

// What was timed.
struct Timings {
  double one_ns = 0;  // an exchange of a byte by itself
  double each_ns = 0,
         messages = 0;  // each of many exchanges in flight; messages of a rank in it, both ways
  double bytes = 0, bytes_ns = 0;  // an exchange of so many bytes
};
// The model that these follow from, within the bounds of what a network can be.
NetworkModel model_of(const Timings& timings);

}  // namespace smddp
