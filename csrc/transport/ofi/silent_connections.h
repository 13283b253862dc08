// Connections to the port at which libfabric accepts that say nothing: it takes them all and keeps them for ever, so
// that they use up the process's descriptors. Keeps their number and their time within limits. Called by Endpoint.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/file_descriptor.h"

namespace smddp::ofi {

class SilentConnections {
 public:
  // libfabric listens at `address`, a provider's. The kernel keeps a connection back until it says something, for a
  // while, and one that is idle alive, for firewalls that forget those. Nothing to do for a provider without TCP.
  void guard(std::span<const uint8_t> address);
  // Ends connections that have been silent for too long, and the oldest ones if they are too many or if descriptors
  // run out: libfabric finds them closed. Looks at the descriptors now and then, if it is called.
  void look(uint64_t now_ns);

 private:
  std::vector<uint16_t> ports_;
  uint64_t next_ns_ = 0;
  FileDescriptor spare_;  // given up where no other one is left, to look at the others
  int seen_ = 0;          // the lowest free descriptor at the latest look at all
  bool waiting_ = false;  // some were silent then
};

}  // namespace smddp::ofi
