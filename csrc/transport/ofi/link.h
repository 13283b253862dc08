// What tells the NIC of a rail from another one, and its rate, for what is known of a network only as long as its
// NICs are the same. Opens nothing of libfabric. Called when an endpoint opens.
#pragma once

#include <string>

#include "transport/ofi/provider.h"

namespace smddp::fabric {

// "rdmap0s6 100000000000 bit/s", "eth0 02:00:0a:00:00:01 10000 Mbit/s": what the provider and the kernel say of it.
std::string describe_link(const Choice& choice);

}  // namespace smddp::fabric
