#include "fabric/offer.h"

#include <algorithm>
#include <iterator>
#include <tuple>

namespace smddp::fabric {
namespace {

// Hardware transports first, then TCP. "tcp" alone is an RDM provider from libfabric 1.18 on; 1.17
// has an early form of it, "net", whose wait descriptor stays readable for good, so that every
// sleep on it is a spin: ofi_rxm, for all its bounce buffers, is better there.
constexpr const char* kBestFirst[] = {"efa", "cxi", "verbs;ofi_rxm", "psm3",
                                      "opx", "tcp", "tcp;ofi_rxm",   "net"};
// Worse than a name that is in neither list: "sockets" blocks in fi_send while it connects.
constexpr const char* kWorstLast[] = {"sockets", "udp;ofi_rxd"};
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
    return std::tuple(reach, rank_of(offer.provider), offer.small_messages, offer.ipv6, i);
  };
  std::sort(usable.begin(), usable.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  return usable;
}

}  // namespace smddp::fabric
