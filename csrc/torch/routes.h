// Which collectives of a group the fallback carries although smddp could: the user's choice, by collective
// and size. Used by ProcessGroupSMDDP alone; knows no tensors.
#pragma once

#include <c10/core/DeviceType.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/types.h"

namespace smddp {

// The reason of a call that the fallback carries because the user, or a measurement, chose it.
extern const char kRouted[];

// kNccl and kGloo concern the tensors that this backend carries, CUDA tensors or CPU tensors; others stay
// smddp's. kMeasured: what is faster on this group. kDefault: that for CUDA tensors, and smddp for CPU tensors.
enum class Route : uint8_t { kSmddp, kFallback, kNccl, kGloo, kMeasured, kDefault };

// For operations of at most `up_to` bytes of the whole tensor.
struct RouteStep {
  uint64_t up_to = UINT64_MAX;
  Route route = Route::kSmddp;
};
using RouteSteps = std::vector<RouteStep>;  // in rising order; beyond the last one, smddp

// By Collective: AllGather, ReduceScatter, AllReduce.
using RouteTable = std::array<RouteSteps, 3>;

std::optional<Route> parse_route(const std::string& name);
// The same text on all ranks that have the same table.
std::string text_of(const RouteTable& table);

class Routes {
 public:
  // The steps for a collective on a device, measured together with all other ranks; nothing if it can't
  // measure now.
  using Measure = std::function<std::optional<RouteSteps>(Collective, c10::DeviceType)>;

  Routes(RouteTable table, Measure measure)
      : table_(std::move(table)), measure_(std::move(measure)) {}

  // Whether it can be another's than smddp's.
  bool any(Collective collective, c10::DeviceType device) const;
  // Whether the fallback carries an operation of `bytes` bytes. The first one on a device whose route is
  // measured measures it: a call of all ranks. With `may_measure` false it stays smddp's instead.
  bool leads_away(Collective collective, c10::DeviceType device, uint64_t bytes, bool may_measure);
  // While a route is forced, operations of the calling thread take it. For the measurement.
  void force(std::optional<Route> route);

 private:
  const RouteSteps* measured(Collective collective, c10::DeviceType device);

  const RouteTable table_;
  const Measure measure_;
  std::mutex mutex_;  // held while it measures
  std::map<std::pair<Collective, c10::DeviceType>, RouteSteps> measured_;
  std::atomic<std::thread::id>
      measuring_{};  // the thread that measures; only that thread reads forced_
  std::optional<Route> forced_;
};

}  // namespace smddp
