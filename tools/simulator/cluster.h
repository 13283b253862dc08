// Many ranks of a simulated cluster in one process and one thread: the engine and the group of each are the
// real ones, over a network in virtual time. Runs collectives and counts what they took. The
// command and the tests use it.
//
// What is simulated is the network and the clock. Ranks of one host move bytes through real shared segments;
// that takes real time, and virtual time by `copy_bytes_per_ns`. All other work of a processor takes no
// virtual time, but for what the model says of messages.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/operation.h"
#include "common/status.h"
#include "group/group.h"
#include "progress/process.h"
#include "simulator/network.h"
#include "simulator/transport.h"

namespace smddp::simulator {

struct Layout {
  int hosts = 2;
  int ranks_per_host = 1;
  int ranks() const { return hosts * ranks_per_host; }
};

// Of the ranks of a host among each other.
struct HostModel {
  double wake_ns = 1'000;        // until a rank sees what another has pushed
  double copy_bytes_per_ns = 5;  // of one core; docs/dev/one-allgather.md
};

// What one operation took, of all ranks together where it is not said otherwise.
struct Outcome {
  double seconds = 0;        // of virtual time, from the call to the last rank's end
  double first_seconds = 0;  // to the first rank's end
  NetworkCounters network;
  double most_bytes_out = 0, most_bytes_in = 0;  // of the NIC that has most
  uint64_t passes = 0, most_passes = 0;          // of all engines, and of the busiest
  uint64_t idle_looks = 0;  // times that nothing was under way, and ranks looked for late ones
  double real_seconds = 0;  // that the simulation took
};

class Cluster {
 public:
  // Sets common/clock.h to virtual time, for the rest of the process's life.
  static Result<std::unique_ptr<Cluster>> create(const Model& model, const Layout& layout,
                                                 const HostModel& host = {});
  ~Cluster();

  const Layout& layout() const { return layout_; }
  VirtualNetwork& network() { return *network_; }
  Process& process(Rank rank) { return *ranks_[static_cast<size_t>(rank)].process; }
  Group& group(Rank rank) { return *ranks_[static_cast<size_t>(rank)].group; }
  // Of what a rank publishes when the group is made (joining/rank_info.h), as the mean of all ranks.
  size_t rank_info_bytes() const { return rank_info_bytes_ / ranks_.size(); }
  const RankInfo& rank_info() const { return rank_info_; }  // of rank 0

  // Every rank calls its operation now, and all are waited for. The error of the first rank that has one;
  // kTimeout if nothing moves any more.
  Result<Outcome> run(const std::vector<std::shared_ptr<Operation>>& operations,
                      const Tuning& tuning = {});

 private:
  struct SimulatedRank {
    std::unique_ptr<Process> process;
    std::unique_ptr<Group> group;
    uint64_t taken = 0;  // bytes of its operation that its time counts already
    bool called = false, over = false;
  };
  class Count;
  Cluster(const Layout& layout, const HostModel& host) : layout_(layout), host_(host) {}
  Status set_up(const Model& model);
  // Lets happen what is still under way.
  void settle();
  // Rank `process` runs until nothing moves.
  void turn(ProcessNumber process, Operation& operation, bool watches, bool called);

  const Layout layout_;
  const HostModel host_;
  std::unique_ptr<VirtualNetwork> network_;
  MemoryTransport::Shared transports_;  // outlives the engines
  std::vector<SimulatedRank> ranks_;
  size_t rank_info_bytes_ = 0;  // of all ranks
  RankInfo rank_info_;
};

}  // namespace smddp::simulator
