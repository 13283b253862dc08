// The choice of how chunks and messages travel over a provider. Called when an endpoint opens.
#pragma once

#include <string>

#include "common/status.h"
#include "transport/ofi/endpoint.h"

struct fi_info;

namespace smddp::fabric {

const char* name_of(Transfer transfer);

// `wanted` ("writes", "tagged", "messages"), or the provider's default if it is empty. kInvalid for
// another word, kUnavailable if the provider can't do it. `emulated`: the provider
// turns writes into messages of its own, with copies; then it counts as a provider that has no
// writes.
Result<Transfer> choose_transfer(const fi_info& info, bool emulated, const std::string& wanted);

// Whether messages go over TCP connections of the endpoint's own: by `wanted` ("sockets", "libfabric"), or where
// the provider sends them over TCP as well, but at a higher cost, if it is empty. `ip`: the provider's addresses are
// IP addresses. `only_messages`: of several NICs, and there are no chunks: one connection would use one NIC. kInvalid
// for another word, kUnavailable if the provider can't do it.
Result<bool> choose_sockets(const fi_info& info, bool ip, bool only_messages,
                            const std::string& wanted);

}  // namespace smddp::fabric
