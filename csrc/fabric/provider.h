// Which of fi_getinfo's offers to use.
#pragma once

#include <vector>

#include "common/status.h"
#include "fabric/endpoint.h"
#include "fabric/loader.h"
#include "fabric/offer.h"
#include "fabric/resource.h"

namespace smddp::fabric {

struct Choice {
  InfoHandle info;
  Offer offer;
};

// What to open as the rails of one endpoint; all of one provider.
using RailChoices = std::vector<Choice>;

// The usable sets of rails of this host, best first and at least one; kUnavailable with what was asked
// for and what is on offer where nothing matches.
Result<std::vector<RailChoices>> choose(const Library& library, const Options& options);

}  // namespace smddp::fabric
