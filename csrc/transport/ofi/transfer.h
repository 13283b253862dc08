// The choice of how chunks travel over a provider. Called when an endpoint opens.
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

}  // namespace smddp::fabric
