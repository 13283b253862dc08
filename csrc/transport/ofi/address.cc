#include "transport/ofi/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fabric.h>
#include <sys/socket.h>

#include <cstring>

#include "common/tcp_sockets.h"

namespace smddp::ofi {
namespace {

// Fields are little-endian, like everything in wire.h.
struct Prefix {
  uint32_t protocol;
  uint32_t format;
  char provider[32];  // zero-padded; for the error text only
  uint8_t writes;
  uint8_t rails;
  uint8_t reserved[6];
};
static_assert(sizeof(Prefix) == 48);

Prefix prefix_of(const fi_info& info) {
  Prefix prefix = {};
  prefix.protocol = info.ep_attr->protocol;
  prefix.format = info.addr_format;
  std::strncpy(prefix.provider, info.fabric_attr->prov_name, sizeof prefix.provider - 1);
  return prefix;
}

// AF_UNSPEC if the address is not an IPv4 or IPv6 sockaddr; only its size and family can tell.
int family_of(const void* address, size_t size) {
  if (address == nullptr) return AF_UNSPEC;
  return SocketAddress::of({static_cast<const uint8_t*>(address), size}).family();
}

}  // namespace

IpAddress describe_ip(const void* address, size_t size) {
  IpAddress ip;
  char text[INET6_ADDRSTRLEN] = {};
  switch (family_of(address, size)) {
    case AF_INET: {
      sockaddr_in v4;
      std::memcpy(&v4, address, sizeof v4);
      uint32_t host = ntohl(v4.sin_addr.s_addr);
      ip.loopback = host >> 24 == 127;
      ip.link_local = host >> 16 == 0xa9fe;  // 169.254/16
      ip.wildcard = host == INADDR_ANY;
      if (::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text) != nullptr) ip.text = text;
      break;
    }
    case AF_INET6: {
      sockaddr_in6 v6;
      std::memcpy(&v6, address, sizeof v6);
      ip.ipv6 = true;
      ip.loopback = IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
      ip.link_local = IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr);
      ip.wildcard = IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr);
      if (::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text) != nullptr) ip.text = text;
      break;
    }
    default:
      break;
  }
  return ip;
}

void replace_wildcard(std::span<uint8_t> name, const void* source, size_t source_size) {
  int family = family_of(name.data(), name.size());
  if (family != family_of(source, source_size) || !describe_ip(name.data(), name.size()).wildcard) {
    return;
  }
  const uint8_t* from = static_cast<const uint8_t*>(source);
  if (family == AF_INET) {
    std::memcpy(name.data() + offsetof(sockaddr_in, sin_addr),
                from + offsetof(sockaddr_in, sin_addr), sizeof(in_addr));
  } else if (family == AF_INET6) {
    std::memcpy(name.data() + offsetof(sockaddr_in6, sin6_addr),
                from + offsetof(sockaddr_in6, sin6_addr), sizeof(in6_addr));
  }
}

std::vector<uint8_t> pack_address(const fi_info& info, const PublishedAddress& address) {
  Prefix prefix = prefix_of(info);
  prefix.writes = address.writes;
  prefix.rails = static_cast<uint8_t>(address.names.size());
  std::vector<uint8_t> published(sizeof prefix);
  std::memcpy(published.data(), &prefix, sizeof prefix);
  for (const std::vector<uint8_t>& name : address.names) {
    published.insert(published.end(), name.begin(), name.end());
  }
  return published;
}

Result<PublishedAddress> unpack_address(const fi_info& info, std::span<const uint8_t> published,
                                        size_t name_size) {
  Prefix mine = prefix_of(info), theirs;
  if (published.size() < sizeof theirs) {
    return Status(Code::kInvalid, "a peer's fabric address of " + std::to_string(published.size()) +
                                      " bytes is too short");
  }
  std::memcpy(&theirs, published.data(), sizeof theirs);
  theirs.provider[sizeof theirs.provider - 1] = '\0';
  if (theirs.protocol != mine.protocol || theirs.format != mine.format) {
    return Status(Code::kInvalid, std::string("a peer's endpoint is of libfabric provider ") +
                                      theirs.provider + " and this rank's of " + mine.provider +
                                      ", which can't communicate: set "
                                      "SMDDP_FABRIC_PROVIDER to the same on every host");
  }
  std::span<const uint8_t> names = published.subspan(sizeof theirs);
  if (theirs.rails == 0 || theirs.rails > kMaxRails || names.size() != theirs.rails * name_size ||
      theirs.writes > 1) {
    return Status(Code::kInvalid, "a peer's fabric address holds " + std::to_string(names.size()) +
                                      " bytes for " + std::to_string(theirs.rails) +
                                      " NICs where its provider takes " +
                                      std::to_string(name_size) + " for each");
  }
  PublishedAddress address{theirs.writes == 1, {}};
  for (size_t rail = 0; rail < theirs.rails; ++rail) {
    std::span<const uint8_t> name = names.subspan(rail * name_size, name_size);
    address.names.emplace_back(name.begin(), name.end());
  }
  return address;
}

}  // namespace smddp::ofi
