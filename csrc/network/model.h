// The model of the network between two hosts: three numbers. Knows neither how they were found nor what follows
// from them. Everything that has to do with the network's speed uses it.
#pragma once

#include <string>

#include "common/status.h"

namespace smddp {

// In the terms of LogGP (Alexandrov et al., SPAA 1995).
struct NetworkModel {
  double latency_ns = 20'000;  // from a send to its arrival, without the overheads
  double overhead_ns = 4'000;  // of a processor, per message and end
  double bytes_per_ns = 1.25;  // of a host's NICs together
};
// What a measurement may give, of each number by itself: between hosts no network has less, or more.
inline constexpr NetworkModel kLeastMeasured{1e3, 100, 1e-3}, kMostMeasured{10e6, 50e3, 1e3};

// The numbers of curve in SMDDP_DEBUG, between colons or commas. kInvalid, with what the text may be, if it is something else.
Result<NetworkModel> parse_network_model(const std::string& text);
// What parse_network_model() reads.
std::string text_of(const NetworkModel& network);

}  // namespace smddp
