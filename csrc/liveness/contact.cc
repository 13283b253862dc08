#include "liveness/contact.h"

#include <algorithm>
#include <cstring>

namespace smddp::liveness {

void Contact::set_address(const SocketAddress& address) {
  ipv6 = address.family() == AF_INET6 ? 1 : 0;
  port = address.port();
  std::ranges::copy(address.ip(), ip.begin());
}

SocketAddress Contact::address() const {
  sockaddr_in v4 = {};
  sockaddr_in6 v6 = {};
  v4.sin_family = AF_INET;
  v6.sin6_family = AF_INET6;
  std::memcpy(&v4.sin_addr, ip.data(), sizeof v4.sin_addr);
  std::memcpy(&v6.sin6_addr, ip.data(), sizeof v6.sin6_addr);
  SocketAddress made = ipv6 != 0 ? SocketAddress(v6) : SocketAddress(v4);
  made.set_port(port);
  return made;
}

std::vector<uint8_t> pack(const Contact& contact) {
  std::vector<uint8_t> bytes(sizeof contact);
  std::memcpy(bytes.data(), &contact, sizeof contact);
  return bytes;
}

Result<Contact> unpack(const std::vector<uint8_t>& published) {
  Contact contact;
  if (published.size() != sizeof contact)
    return Status(Code::kInvalid, "a rank published a damaged contact for its liveness");
  std::memcpy(&contact, published.data(), sizeof contact);
  return contact;
}

}  // namespace smddp::liveness
