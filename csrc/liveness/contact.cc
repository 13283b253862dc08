#include "liveness/contact.h"

#include <arpa/inet.h>

#include <cstring>

namespace smddp::liveness {

std::string Contact::text() const {
  char address[INET6_ADDRSTRLEN] = {};
  ::inet_ntop(ipv6 != 0 ? AF_INET6 : AF_INET, ip.data(), address, sizeof address);
  std::string host = ipv6 != 0 ? "[" + std::string(address) + "]" : address;
  return host + ":" + std::to_string(port);
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
