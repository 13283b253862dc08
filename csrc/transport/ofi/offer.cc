#include "transport/ofi/offer.h"

#include <algorithm>
#include <iterator>
#include <tuple>

#include "common/interfaces.h"

namespace smddp::ofi {
namespace {

// Hardware transports first, then TCP. "tcp" alone is an RDM provider from libfabric 1.18 on; 1.17
// has an early form of it, "net", which can't be slept on. With 1.17 ofi_rxm is better in spite of
// its bounce buffers.
constexpr const char* kBestFirst[] = {"efa", "verbs;ofi_rxm", "psm3", "opx",
                                      "tcp", "tcp;ofi_rxm",   "net"};
// After a name that is in neither list: "sockets" blocks in fi_send while it connects.
constexpr const char* kWorstLast[] = {"sockets", "udp;ofi_rxd"};
constexpr const char* kAllNics[] = {"efa", "verbs"};
constexpr const char* kOnlyByName[] = {"shm", "sm2", "lnx", "ofi_mrail", "off_coll"};

template <size_t N>
size_t position(const char* const (&names)[N], const std::string& name) {
  return static_cast<size_t>(std::find(names, names + N, name) - names);
}

size_t rank_of(const std::string& provider) {
  constexpr size_t kBest = std::size(kBestFirst), kWorst = std::size(kWorstLast);
  if (size_t best = position(kBestFirst, provider); best < kBest) return best;
  size_t worst = position(kWorstLast, provider);
  return worst < kWorst ? kBest + 1 + worst : kBest;
}

std::string core_of(const std::string& provider) { return provider.substr(0, provider.find(';')); }

bool only_by_name(const std::string& provider) {
  return position(kOnlyByName, core_of(provider)) < std::size(kOnlyByName);
}

bool is_called(const NicOffer& offer, const std::string& name) {
  return offer.domain == name || offer.domain == name + "-rdm" || offer.interface == name ||
         offer.address == name;
}

bool begins_with(const NicOffer& offer, const std::string& name) {
  return offer.domain.starts_with(name) || offer.interface.starts_with(name) ||
         offer.address.starts_with(name);
}

std::vector<NicOffer> left_by(const std::vector<NicOffer>& offers, const std::string& excluding) {
  std::vector<NicOffer> left = offers;
  for (NicOffer& offer : left) {
    for (const std::string& name : {offer.domain, offer.interface, offer.address})
      offer.excluded |= leaves_out(excluding, name);
  }
  return left;
}

// If no interface is named, the reach of an offer's address is the first criterion.
int reach(const NicOffer& offer) {
  if (offer.loopback) return 3;
  if (offer.link_local) return 2;
  return is_host_bridge(offer.interface) ? 1 : 0;
}

bool of_real_nics(const NicOffer& offer) {
  return position(kAllNics, core_of(offer.provider)) < std::size(kAllNics);
}

// All NICs that match the provider and the reach of `best`, one offer of each.
std::vector<size_t> all_nics(const std::vector<NicOffer>& offers, const std::vector<size_t>& ranked,
                             size_t most) {
  const NicOffer& best = offers[ranked[0]];
  std::vector<size_t> nics;
  for (size_t i : ranked) {
    const NicOffer& offer = offers[i];
    bool alike = offer.provider == best.provider && reach(offer) == reach(best) &&
                 offer.small_messages == best.small_messages && offer.ipv6 == best.ipv6;
    bool known = std::any_of(nics.begin(), nics.end(),
                             [&](size_t nic) { return offers[nic].domain == offer.domain; });
    if (alike && !known) nics.push_back(i);
  }
  std::sort(nics.begin(), nics.end(), [&](size_t a, size_t b) {
    return std::tuple(offers[a].domain.size(), offers[a].domain) <
           std::tuple(offers[b].domain.size(), offers[b].domain);
  });
  nics.resize(std::min(nics.size(), most));
  return nics;
}

}  // namespace

std::string NicOffer::place() const {
  return address.empty() ? domain : domain + " (" + address + ")";
}

std::string NicOffer::text() const { return provider + " on " + place(); }

std::vector<size_t> rank_offers(const std::vector<NicOffer>& offers, const std::string& provider,
                                const std::string& interface) {
  bool whole_name = std::any_of(offers.begin(), offers.end(),
                                [&](const NicOffer& o) { return o.provider == provider; });
  bool any_called =
      !interface.empty() && std::any_of(offers.begin(), offers.end(),
                                        [&](const NicOffer& o) { return is_called(o, interface); });
  std::vector<size_t> usable;
  for (size_t i = 0; i < offers.size(); ++i) {
    const NicOffer& offer = offers[i];
    if (provider.empty() ? only_by_name(offer.provider)
                         : provider != (whole_name ? offer.provider : core_of(offer.provider))) {
      continue;
    }
    bool named = any_called ? is_called(offer, interface) : begins_with(offer, interface);
    if (named && !offer.excluded) usable.push_back(i);
  }
  auto key = [&](size_t i) {
    const NicOffer& offer = offers[i];
    return std::tuple(reach(offer), rank_of(offer.provider), offer.small_messages, offer.ipv6, i);
  };
  std::sort(usable.begin(), usable.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  return usable;
}

std::vector<std::vector<size_t>> rail_sets(const std::vector<NicOffer>& offers,
                                           const std::string& provider,
                                           const std::string& interfaces, size_t most) {
  if (interfaces.starts_with('^'))
    return rail_sets(left_by(offers, interfaces), provider, "", most);
  std::vector<std::string> names = split_list(interfaces);
  bool holes = names.size() > 1 && std::count(names.begin(), names.end(), "") > 0;
  if (names.size() > most || holes) return {};
  std::vector<size_t> ranked = rank_offers(offers, provider, names[0]);
  std::vector<std::vector<size_t>> sets;
  if (interfaces.empty() && !ranked.empty() && of_real_nics(offers[ranked[0]])) {
    sets.push_back(all_nics(offers, ranked, most));
  }
  for (size_t first : ranked) {
    std::vector<size_t> set = {first};
    for (size_t i = 1; i < names.size(); ++i) {
      std::vector<size_t> here = rank_offers(offers, provider, names[i]);
      auto same = std::find_if(here.begin(), here.end(), [&](size_t at) {
        return offers[at].provider == offers[first].provider &&
               offers[at].ipv6 == offers[first].ipv6;
      });
      if (same != here.end()) set.push_back(*same);
    }
    if (set.size() == names.size()) sets.push_back(set);
  }
  return sets;
}

}  // namespace smddp::ofi
