#include "transport/ofi/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fabric.h>
#include <sys/socket.h>

#include <algorithm>
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

// Of no family if the address is not an IPv4 or IPv6 sockaddr; only its size and family can tell.
SocketAddress socket_address(const void* address, size_t size) {
  if (address == nullptr) return {};
  return SocketAddress::of({static_cast<const uint8_t*>(address), size});
}

}  // namespace

IpAddress describe_ip(const void* address, size_t size) {
  IpAddress ip;
  SocketAddress at = socket_address(address, size);
  if (at.family() == AF_INET) {
    uint32_t host = 0;
    std::memcpy(&host, at.ip().data(), sizeof host);
    host = ntohl(host);
    ip.loopback = host >> 24 == 127;
    ip.link_local = host >> 16 == 0xa9fe;  // 169.254/16
    ip.wildcard = host == INADDR_ANY;
  } else if (at.family() == AF_INET6) {
    in6_addr host;
    std::memcpy(&host, at.ip().data(), sizeof host);
    ip.ipv6 = true;
    ip.loopback = IN6_IS_ADDR_LOOPBACK(&host);
    ip.link_local = IN6_IS_ADDR_LINKLOCAL(&host);
    ip.wildcard = IN6_IS_ADDR_UNSPECIFIED(&host);
  }
  ip.text = at.ip_text();
  return ip;
}

void replace_wildcard(std::span<uint8_t> name, const void* source, size_t source_size) {
  const SocketAddress own = socket_address(name.data(), name.size());
  const SocketAddress other = socket_address(source, source_size);
  if (own.family() != other.family() || !describe_ip(name.data(), name.size()).wildcard) return;
  auto at = own.ip().data() - reinterpret_cast<const uint8_t*>(own.get());
  std::ranges::copy(other.ip(), name.begin() + at);
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
