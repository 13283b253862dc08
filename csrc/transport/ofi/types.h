// The endpoint's limits and counters, and the interface's names that its classes use. Shows nothing of
// libfabric's headers.
#pragma once

#include <cstdint>

#include "transport/transport.h"

namespace smddp::ofi {

using transport::kControlMessage;
using transport::kEagerMessage;
using transport::kMaxMessage;
using transport::MemoryOwner;
using transport::MessageBuffer;
using transport::Peer;
using transport::Sink;
using wire::kMaxRails;

struct Counters : transport::Counters {
  uint64_t retries = 0;         // -FI_EAGAIN answers
  uint64_t receive_errors = 0;  // messages lost on arrival: truncated, or their connection broke
  uint64_t registrations = 0, registration_hits = 0;  // asked of the provider; found in the cache
};

}  // namespace smddp::ofi
