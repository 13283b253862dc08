// Addresses of endpoints: the bytes that a rank publishes, and IP addresses as text. Knows nothing
// of open endpoints. Called by the choice of a provider, and by the rails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "transport/ofi/types.h"

struct fi_info;
struct sockaddr;

namespace smddp::ofi {

struct IpAddress {
  std::string text;  // "192.0.2.2"; empty if it is no IP address
  bool ipv6 = false;
  bool loopback = false;
  bool link_local = false;
  bool wildcard = false;
};

IpAddress describe_ip(const void* address, size_t size);

// Replaces a wildcard IP address in `name`, which fi_getname has filled in, by that of `source`.
void replace_wildcard(std::span<uint8_t> name, const void* source, size_t source_size);

// The published form: wire protocol, address format, provider's name, whether it has regions, then the
// provider's own bytes of each rail. So add_peer refuses a peer whose provider can't communicate
// with this rank's; without the check its messages would only stay unanswered.
struct PublishedAddress {
  bool writes = false;                      // its regions can be written into
  std::vector<std::vector<uint8_t>> names;  // by rail; of equal size
};

std::vector<uint8_t> pack_address(const fi_info& info, const PublishedAddress& address);

// The address that a peer published; its names must have this endpoint's length, `name_size`.
// kInvalid with both providers' names if the two can't communicate; kInvalid too if the form is
// damaged.
Result<PublishedAddress> unpack_address(const fi_info& info, std::span<const uint8_t> published,
                                        size_t name_size);

}  // namespace smddp::ofi
