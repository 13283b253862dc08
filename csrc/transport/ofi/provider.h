// Asks fi_getinfo for its offers and chooses those to open. Opens nothing itself. Called when an
// endpoint opens.
#pragma once

#include <vector>

#include "common/status.h"
#include "transport/ofi/loader.h"
#include "transport/ofi/offer.h"
#include "transport/ofi/open.h"
#include "transport/ofi/resource.h"

namespace smddp::ofi {

struct Choice {
  InfoHandle info;
  NicOffer offer;
};

// The rails of one endpoint; all of one provider.
using RailChoices = std::vector<Choice>;

// The usable sets of rails of this host, best first and at least one. If nothing matches:
// kUnavailable with the options asked for and all offers.
Result<std::vector<RailChoices>> choose(const Library& library, const Options& options);

// What tells the NIC from another one, and its rate, as the provider and the kernel say it: "rdmap0s6 100000000000
// bit/s", "eth0 02:00:0a:00:00:01 10000 Mbit/s".
std::string describe_link(const Choice& choice);

}  // namespace smddp::ofi
