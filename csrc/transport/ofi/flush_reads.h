// Flush reads: a device may see a NIC's writes into its memory later than the processor is told of
// them. A read of that memory through the same NIC completes after the writes that are on
// their way (PCIe's ordering rules); NCCL and aws-ofi-nccl flush in this way as well. Each rail
// reads a region once all of its chunks have been written. Called by Regions only.
#pragma once

#include <vector>

#include "transport/ofi/peer_table.h"
#include "transport/ofi/requests.h"

namespace smddp::ofi {

struct Region;
inline constexpr size_t kMostRegions = 4096;

class FlushReads {
 public:
  FlushReads(RailSet& rails, PeerTable& peers) : rails_(rails), peers_(peers) {}

  // Makes the reads, and the address of each rail in its own address vector. Later calls do
  // nothing.
  Status prepare();

  // Starts each rail's read of the region. A read that is refused for good loses the region's
  // sender.
  void begin(Region& region);
  // A read has completed, or completed with an error. The number of its region.
  uint32_t finish(FlushRead* read);

  // Regions with reads that could not be started.
  bool waits() const { return !unflushed_.empty(); }
  size_t waiting() const { return unflushed_.size(); }
  uint32_t next_waiting();
  // Starts no more reads of the region.
  void forget(uint32_t region) { std::erase(unflushed_, region); }
  bool idle() const { return free_.size() == reads_.size(); }

 private:
  RailSet& rails_;
  PeerTable& peers_;
  Mapping target_;  // of all flush reads; contents unused
  std::vector<FlushRead> reads_;
  RequestQueue<FlushRead> free_;
  std::vector<fi_addr_t> own_addresses_;      // by rail: its own; empty before prepare()
  std::vector<Registration*> registrations_;  // of target_, by rail; nullptr: none needed
  std::vector<uint32_t> unflushed_;           // numbers of regions
};

}  // namespace smddp::ofi
