#include "fabric/offer.h"

#include <algorithm>
#include <iterator>
#include <tuple>

namespace smddp::fabric {
namespace {

// Hardware transports first, then TCP from the most to the least direct. "tcp" is its own RDM
// provider from libfabric 1.18 on ("net" is the same code in 1.17); before, it exists only under
// ofi_rxm. A name that is not here ranks before the last, which is for tests.
constexpr const char* kBestFirst[] = {"efa",  "cxi",         "verbs;ofi_rxm", "psm3",
                                      "opx",  "tcp",         "tcp;ofi_rxm",   "net",
                                      "sockets"};
constexpr const char* kLast = "udp;ofi_rxd";
constexpr const char* kOnlyByName[] = {"shm", "sm2", "lnx", "ofi_mrail", "off_coll"};

size_t rank_of(const std::string& provider) {
  if (provider == kLast) return std::size(kBestFirst) + 1;
  const char* const* found = std::find(std::begin(kBestFirst), std::end(kBestFirst), provider);
  return static_cast<size_t>(found - std::begin(kBestFirst));
}

std::string core_of(const std::string& provider) { return provider.substr(0, provider.find(';')); }

bool only_by_name(const std::string& provider) {
  return std::find(std::begin(kOnlyByName), std::end(kOnlyByName), core_of(provider)) !=
         std::end(kOnlyByName);
}

// Bridges that container and machine emulators make carry addresses no other host can reach.
bool is_host_bridge(const std::string& interface) {
  for (const char* prefix : {"docker", "virbr", "br-", "veth", "lxc", "podman", "cni"}) {
    if (interface.starts_with(prefix)) return true;
  }
  return false;
}

bool matches_interface(const Offer& offer, const std::string& wanted) {
  return wanted.empty() || offer.domain == wanted || offer.domain == wanted + "-rdm" ||
         offer.interface == wanted || offer.address == wanted;
}

}  // namespace

std::string Offer::text() const {
  std::string text = provider + " on " + domain;
  if (!address.empty()) text += " (" + address + ")";
  return text;
}

std::vector<size_t> rank_offers(const std::vector<Offer>& offers, const std::string& provider,
                                const std::string& interface) {
  bool whole_name = std::any_of(offers.begin(), offers.end(),
                                [&](const Offer& o) { return o.provider == provider; });
  std::vector<size_t> usable;
  for (size_t i = 0; i < offers.size(); ++i) {
    const Offer& offer = offers[i];
    if (provider.empty() ? only_by_name(offer.provider)
                         : provider != (whole_name ? offer.provider : core_of(offer.provider))) {
      continue;
    }
    if (matches_interface(offer, interface)) usable.push_back(i);
  }
  auto key = [&](size_t i) {
    const Offer& offer = offers[i];
    int reach = 0;
    if (is_host_bridge(offer.interface)) reach = 1;
    if (offer.link_local) reach = 2;
    if (offer.loopback) reach = 3;
    return std::tuple(reach, rank_of(offer.provider), offer.small_messages, offer.ipv6,
                      i);
  };
  std::sort(usable.begin(), usable.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  return usable;
}

}  // namespace smddp::fabric
