#include "transport/ofi/provider.h"

#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <rdma/fi_errno.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "common/file_descriptor.h"
#include "transport/ofi/address.h"
#include "transport/ofi/requests.h"

namespace smddp::ofi {
namespace {

using InterfaceTable = std::map<std::string, std::string>;  // name by IP address

InterfaceTable read_interfaces() {
  InterfaceTable table;
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return table;
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  for (ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr) continue;
    bool v6 = at->ifa_addr->sa_family == AF_INET6;
    size_t size = v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    IpAddress ip = describe_ip(at->ifa_addr, size);
    if (!ip.text.empty()) table.emplace(ip.text, at->ifa_name);
  }
  return table;
}

NicOffer offer_of(const fi_info& info, const InterfaceTable& interfaces) {
  NicOffer offer;
  offer.provider = info.fabric_attr->prov_name;
  if (info.domain_attr->name != nullptr) offer.domain = info.domain_attr->name;
  IpAddress ip = describe_ip(info.src_addr, info.src_addrlen);
  offer.address = ip.text;
  offer.ipv6 = ip.ipv6;
  offer.loopback = ip.loopback;
  offer.link_local = ip.link_local;
  auto named = interfaces.find(ip.text);
  if (named != interfaces.end()) offer.interface = named->second;
  offer.small_messages = info.ep_attr->max_msg_size < kMaxMessage;
  offer.device_memory = (info.caps & FI_HMEM) != 0;
  return offer;
}

struct List {
  std::vector<InfoHandle> heads;
  std::vector<const fi_info*> infos;
  std::vector<NicOffer> offers;
};

// Appends the offers that have `caps`. If there is none, that is no error.
Status add_offers(const Library& library, const std::string& provider, uint64_t caps,
                  const InterfaceTable& interfaces, List& list) {
  InfoHandle hints = own(library, library.dupinfo(nullptr));
  if (!hints) return Status(Code::kUnavailable, "libfabric is out of memory");
  hints->caps = caps;
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if ((caps & FI_HMEM) != 0) hints->domain_attr->mr_mode |= FI_MR_HMEM;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  if (!provider.empty()) hints->fabric_attr->prov_name = ::strdup(provider.c_str());

  fi_info* first = nullptr;
  int rc = library.getinfo(library.api, nullptr, nullptr, 0, hints.get(), &first);
  list.heads.push_back(own(library, first));
  if (rc == -FI_ENODATA) return Status();
  if (rc != 0) return Status(Code::kUnavailable, "fi_getinfo: " + library.error_text(rc));
  for (const fi_info* info = first; info != nullptr; info = info->next) {
    if (info->fabric_attr->prov_name == nullptr) continue;
    list.infos.push_back(info);
    list.offers.push_back(offer_of(*info, interfaces));
  }
  return Status();
}

// In this order: offers that reach GPUs' memory (if that is wanted), offers that can take chunks,
// offers that have messages only. Of equal offers the first is used.
Result<List> list_offers(const Library& library, const std::string& provider, bool device_memory) {
  List list;
  InterfaceTable interfaces = read_interfaces();
  constexpr uint64_t kChunks = FI_MSG | FI_RMA;
  for (uint64_t caps : {kChunks | uint64_t{FI_HMEM}, kChunks, uint64_t{FI_MSG}}) {
    if ((caps & FI_HMEM) != 0 && !device_memory) continue;
    if (Status status = add_offers(library, provider, caps, interfaces, list); !status) {
      return status;
    }
  }
  return list;
}

// "on offer: tcp;ofi_rxm on eth0, lo; sockets on eth0, lo"
std::string on_offer(const std::vector<NicOffer>& offers) {
  std::map<std::string, std::set<std::string>> domains_of;
  for (const NicOffer& offer : offers) domains_of[offer.provider].insert(offer.domain);
  if (domains_of.empty()) return "it offers none";
  std::string text = "on offer:";
  for (const auto& [provider, domains] : domains_of) {
    text += (text.ends_with(':') ? " " : "; ") + provider;
    for (const std::string& domain : domains) {
      text += (domain == *domains.begin() ? " on " : ", ") + domain;
    }
  }
  return text;
}

Status nothing_matches(const Library& library, const Options& options,
                       const std::vector<NicOffer>& offers) {
  std::string wanted = "no endpoint for reliable datagrams";
  if (!options.provider.empty()) wanted += " of provider '" + options.provider + "'";
  if (!options.interface.empty()) wanted += " on interface '" + options.interface + "'";
  return Status(Code::kUnavailable, "libfabric " + library.version_text() + " has " + wanted +
                                        " (" + on_offer(offers) +
                                        "); see SMDDP_FABRIC_PROVIDER and SMDDP_FABRIC_INTERFACE");
}

std::string hardware_address(int socket, ifreq request) {
  if (::ioctl(socket, SIOCGIFHWADDR, &request) != 0) return {};
  const char* at = request.ifr_hwaddr.sa_data;
  char text[24];
  std::snprintf(text, sizeof text, " %02hhx:%02hhx:%02hhx:%02hhx:%02hhx:%02hhx", at[0], at[1],
                at[2], at[3], at[4], at[5]);
  return text;
}

std::string link_rate(int socket, ifreq request) {
  ethtool_cmd settings{};
  settings.cmd = ETHTOOL_GSET;
  request.ifr_data = reinterpret_cast<char*>(&settings);
  if (::ioctl(socket, SIOCETHTOOL, &request) != 0) return {};
  return " " + std::to_string(ethtool_cmd_speed(&settings)) + " Mbit/s";
}

}  // namespace

Result<std::vector<RailChoices>> choose(const Library& library, const Options& options) {
  Result<List> list = list_offers(library, options.provider, options.device_memory);
  if (!list) return list.status();
  auto sets = [&] {
    return rail_sets(list.value().offers, options.provider, options.interface, kMaxRails);
  };
  std::vector<std::vector<size_t>> found = sets();
  if (found.empty() && !options.provider.empty()) {
    // Ask again without the name, which may be the short name of a core provider; if it is not, the
    // error lists all offers.
    list = list_offers(library, "", options.device_memory);
    if (!list) return list.status();
    found = sets();
  }
  if (found.empty()) return nothing_matches(library, options, list.value().offers);
  std::vector<RailChoices> choices;
  std::set<std::string> seen;
  for (const std::vector<size_t>& set : found) {
    RailChoices rails;
    std::string text;
    for (size_t i : set) {
      InfoHandle copy = own(library, library.dupinfo(list.value().infos[i]));
      if (!copy) return Status(Code::kUnavailable, "libfabric is out of memory");
      const NicOffer& offer = list.value().offers[i];
      text += offer.text() + (offer.device_memory ? "+," : ",");
      rails.push_back({std::move(copy), offer});
    }
    if (seen.insert(text).second) choices.push_back(std::move(rails));
  }
  return choices;
}

std::string describe_link(const Choice& choice) {
  std::string text = choice.offer.domain;
  const fid_nic* nic = choice.info->nic;
  if (nic != nullptr && nic->link_attr != nullptr)
    text += " " + std::to_string(nic->link_attr->speed) + " bit/s";
  const std::string& interface = choice.offer.interface;
  FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (interface.empty() || interface.size() >= IFNAMSIZ || !socket) return text;
  ifreq request{};
  interface.copy(request.ifr_name, IFNAMSIZ - 1);
  return text + " " + interface + hardware_address(socket.get(), request) +
         link_rate(socket.get(), request);
}

}  // namespace smddp::ofi
