// Addresses of endpoints: what a rank publishes, and the text a person reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "fabric/endpoint.h"

struct fi_info;
struct sockaddr;

namespace smddp::fabric {

struct IpAddress {
  std::string text;  // "192.0.2.2"; empty where it is no IP address
  bool ipv6 = false;
  bool loopback = false;
  bool link_local = false;
  bool wildcard = false;
};

IpAddress describe_ip(const void* address, size_t size);

// Gives the wildcard IP address in `name` (what fi_getname filled in) the one of `source`.
void replace_wildcard(std::span<uint8_t> name, const void* source, size_t source_size);

// The published form: wire protocol, address format, provider's name, how chunks travel, then the
// provider's own bytes of each rail. Ranks whose providers can't talk to each other find out at
// add_peer, not by silence.
struct PublishedAddress {
  Transfer transfer;
  std::vector<std::vector<uint8_t>> names;  // by rail; of equal size
};

std::vector<uint8_t> pack_address(const fi_info& info, const PublishedAddress& address);

// What a peer published, its names as long as ours (`name_size`). kInvalid with both providers'
// names where the two can't talk, or where the form is damaged.
Result<PublishedAddress> unpack_address(const fi_info& info, std::span<const uint8_t> published,
                                        size_t name_size);

}  // namespace smddp::fabric
