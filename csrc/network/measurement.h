// Measures the network between hosts while a group is made: a few pairs of hosts exchange bytes. So the cost does
// not grow with the number of hosts. Must not know how a pair exchanges its bytes, nor how the results are
// exchanged. GroupBuilder calls it, with pairs that exchange by the way that data takes later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/status.h"
#include "network/model.h"
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

// Two ranks of different hosts, of which this process is one.
class PairExchange {
 public:
  virtual ~PairExchange() = default;
  virtual int rank() const = 0;  // 0 or 1
  // Each rank sends its `bytes` bytes of `memory`, in which those of rank 0 lie first, to the other one. `cut`: as so
  // many exchanges of a byte, kPairExchanges of them at once. The network may use the memory for longer if that fails.
  virtual Status exchange(const std::shared_ptr<std::vector<std::byte>>& memory, size_t bytes,
                          bool cut, uint64_t timeout_ns) = 0;
  // That this process has sent and received so far.
  virtual uint64_t count_messages() = 0;
};
inline constexpr int kPairExchanges = 8;

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
Result<Timings> measure(PairExchange& pair);
// The model that these follow from, within the bounds of what a network can be.
NetworkModel model_of(const Timings& timings);

}  // namespace smddp
