// The address that another rank has published for its endpoint, and IP addresses.
#include "transport/ofi/address.h"

#include <netinet/in.h>
#include <rdma/fabric.h>

#include <cstdlib>
#include <cstring>

#include "input.h"

using namespace smddp;
using namespace smddp::ofi;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  fi_ep_attr endpoint = {};
  fi_fabric_attr fabric = {};
  char name[] = "tcp;ofi_rxm";
  fabric.prov_name = name;
  fi_info info = {};
  info.ep_attr = &endpoint;
  info.fabric_attr = &fabric;
  endpoint.protocol = input.up_to(3);
  info.addr_format = static_cast<uint32_t>(input.up_to(3));
  size_t name_size = input.up_to(64);
  std::vector<uint8_t> published = input.bytes(size);
  auto address = unpack_address(info, published, name_size);
  if (address.ok()) {
    if (address.value().names.empty() || address.value().names.size() > kMaxRails) std::abort();
    for (const auto& rail : address.value().names) {
      if (rail.size() != name_size) std::abort();
      (void)describe_ip(rail.data(), rail.size());
    }
    if (!unpack_address(info, pack_address(info, address.value()), name_size).ok()) std::abort();
  }
  (void)describe_ip(published.data(), published.size());
  sockaddr_in source = {};
  source.sin_family = AF_INET;
  replace_wildcard(published, &source, sizeof source);
  return 0;
}
