// The regions that this endpoint has opened for its peers: their registrations, how many chunks have come, and whether a
// device sees them. Knows nothing of messages: only the sender's tell what has been written. Called by the Endpoint.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "common/mapping.h"
#include "transport/ofi/flush_reads.h"
#include "transport/ofi/peer_table.h"
#include "transport/ofi/requests.h"

namespace smddp::ofi {

struct Region {
  uint32_t number = 0;
  bool open = false;
  bool abandoned = false;  // its number and its keys stay taken: chunks may come
  Peer from = 0;
  size_t bytes = 0;
  bool counted = false;  // its sender's writes have immediate data, and come in order
  uint32_t arrived = 0;  // chunks
  std::array<Registration*, kMaxRails> registrations{};  // by rail
  uint64_t address = 0;  // of the first byte, for those that have a key: Grant::address
  // In a device's memory only:
  bool lent = false;
  bool asked = false;                  // whether it is visible: the flush reads begin
  uint32_t flushing = 0, flushed = 0;  // rails whose flush read has begun, has completed
  bool flush_failed = false;           // one of them
};

class Regions {
 public:
  Regions(RailSet& rails, PeerTable& peers);

  // As Transport's open_region(), arrived(), visible() and close_region().
  bool open(Peer from, std::byte* memory, size_t bytes, uint32_t* number, wire::Grant* grant);
  size_t arrived(uint32_t number) const;
  bool visible(uint32_t number);
  void close(uint32_t number, bool abandoned);

  // A write has come whose immediate data is a region's number. False: none of a member of the job.
  bool on_chunk(uint64_t number);

  // For memory of a device. Later calls do nothing.
  Status prepare_flushes() { return flushes_.prepare(); }
  // A flush read has completed, or completed with an error.
  void on_flushed(FlushRead* read);
  void on_flush_failed(FlushRead* read, const Status& why);

  // Whether there are flush reads to start again.
  bool waits() const { return flushes_.waits(); }
  void retry();
  bool idle() const { return flushes_.idle(); }

 private:
  Region* find(uint32_t number);
  bool register_memory(Region& region, const std::byte* memory);
  void release(Region& region);  // one that is closed
  // What comes later lies in memory that nobody reads. False: it can't.
  bool divert(Region& region);

  RailSet& rails_;
  PeerTable& peers_;
  std::deque<Region> regions_;  // by number; elements stay where they are
  std::deque<uint32_t> free_;   // longest free first
  std::vector<Mapping>
      unread_;  // of abandoned regions; pages that nothing has come to are not resident
  FlushReads flushes_;
  bool virtual_addresses_;  // of memory that peers write into; otherwise offsets
};

}  // namespace smddp::ofi
