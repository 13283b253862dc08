// How chunks travel over a provider.
#pragma once

#include <string>

#include "common/status.h"
#include "fabric/endpoint.h"

struct fi_info;

namespace smddp::fabric {

const char* name_of(Transfer transfer);

// `wanted` ("writes", "tagged", "messages"), or the provider's default where it is empty. kInvalid
// for another word, kUnavailable where the provider can't do what is wanted. `emulated`: the provider
// turns writes into messages of its own, with copies; then writes are nothing to want.
Result<Transfer> choose_transfer(const fi_info& info, bool emulated, const std::string& wanted);

}  // namespace smddp::fabric
