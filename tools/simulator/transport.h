// The transport of a simulated process: messages and chunks take their time on a VirtualNetwork, and the bytes move
// when that time has come. Knows nothing of groups and engines. The Cluster opens one for each engine.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "simulator/memory_transport.h"
#include "simulator/network.h"

namespace smddp::simulator {

class SimulatedTransport final : public MemoryTransport {
 public:
  // Of the process that runs. `network` and `shared` outlive it.
  SimulatedTransport(VirtualNetwork& network, Shared& shared);

  // A rank that runs handles what has come, 64 completions of each NIC at most.
  Result<int> poll(transport::Sink& sink) override;

 private:
  class Transfer;
  // Of one NIC: a message that has arrived, or something of this process's that has been sent.
  struct Completion {
    std::vector<std::byte> message;
    Sent sent;
  };

  void start(Load load) override;
  void complete(size_t nic, Completion completion);

  VirtualNetwork& network_;
  const ProcessNumber process_;
  std::vector<std::deque<Completion>> completed_;  // by NIC
};

}  // namespace smddp::simulator
