// The offers of fi_getinfo in this folder's own terms, and which of them is best. Knows nothing of
// libfabric. Called by the choice of a provider.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace smddp::ofi {

// One way to reach the network: a provider on an interface.
struct NicOffer {
  std::string provider;   // "tcp;ofi_rxm"
  std::string domain;     // "eth0", "rdmap0s6-rdm"
  std::string address;    // source IP address as text; empty if the provider has another kind
  std::string interface;  // the kernel's interface with that address; empty if there is none
  bool ipv6 = false;
  bool loopback = false;
  bool link_local = false;
  bool small_messages = false;  // can't take the longest message that the endpoint would send
  bool device_memory = false;   // reads and writes GPUs' memory
  bool excluded = false;        // by the user

  // Whether its wait descriptor is readable only when there is something to do. That of "net"
  // (libfabric 1.17's early form of tcp) stays readable forever: a sleep on it would be a spin.
  bool wakes() const { return provider != "net"; }
  std::string place() const;  // "eth0 (192.0.2.2)"
  std::string text() const;   // "tcp;ofi_rxm on eth0 (192.0.2.2)"
};

// Indices of the offers that may be used, best first; a pure function. `provider` (whole name, or
// core provider: "verbs" finds "verbs;ofi_rxm") and `interface` (domain, interface or source IP
// address, or the beginning of one if none is called so) narrow the choice, empty means any. Without `interface`, loopback and link-local
// addresses come after all others. Providers that stay inside a host are used only by name.
std::vector<size_t> rank_offers(const std::vector<NicOffer>& offers, const std::string& provider,
                                const std::string& interface);

// Sets of offers to open as the rails of one endpoint, best first; a pure function. `interfaces` is
// a list with commas, and a set then has one offer for each, all of one provider; an interface that
// is named twice gets two rails. If it is empty and the best offer is of a provider of real NICs
// (efa, verbs), the first set has all NICs that are as good as the best, at most `most` and in the
// order of their names, so that rail i is the same on all hosts. After it, and for other providers,
// each offer is a set of its own. "^docker0,lo": as if it were empty, without what begins with these names.
std::vector<std::vector<size_t>> rail_sets(const std::vector<NicOffer>& offers,
                                           const std::string& provider,
                                           const std::string& interfaces, size_t most);

}  // namespace smddp::ofi
