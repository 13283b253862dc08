// libfabric for simulated processes: endpoints, queues and registrations over a Network, in virtual time. The
// endpoint's own code runs above it unchanged. The simulator hands the library to each engine.
#pragma once

#include "transport/ofi/loader.h"

namespace smddp::fabric::simulated {

class Network;

// The library whose objects belong to the process that the network runs when it opens them. There is one
// network at a time; it outlives the objects.
Library provider_of(Network& network);

}  // namespace smddp::fabric::simulated
