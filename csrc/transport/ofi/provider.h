// Asks fi_getinfo for its offers and chooses those to open. Opens nothing itself. Called when an
// endpoint opens.
#pragma once

#include <vector>

#include "common/status.h"
#include "transport/ofi/loader.h"
#include "transport/ofi/offer.h"
#include "transport/ofi/resource.h"
#include "transport/ofi/types.h"

namespace smddp::fabric {

struct Choice {
  InfoHandle info;
  Offer offer;
};

// The rails of one endpoint; all of one provider.
using RailChoices = std::vector<Choice>;

// The usable sets of rails of this host, best first and at least one. If nothing matches:
// kUnavailable with the options asked for and all offers.
Result<std::vector<RailChoices>> choose(const Library& library, const Options& options);

}  // namespace smddp::fabric
