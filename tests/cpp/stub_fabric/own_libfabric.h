// Tables of functions, and descriptions of what there is (fi_info) as libfabric's own functions make and free
// them. Of the stub.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <cstdlib>
#include <cstring>

namespace smddp::own_libfabric {

// A table of libfabric's functions of which the implementation has some. Written before any thread sees it:
// libfabric's inline functions read it without a lock.
template <class Ops, class Fill>
Ops table(Fill&& fill) {
  Ops ops = {};
  ops.size = sizeof ops;
  fill(ops);
  return ops;
}

inline char* copy(const char* text) { return text != nullptr ? ::strdup(text) : nullptr; }

// All zero, with its attributes but those of NIC and source.
inline fi_info* new_info() {
  auto* info = static_cast<fi_info*>(std::calloc(1, sizeof(fi_info)));
  info->tx_attr = static_cast<fi_tx_attr*>(std::calloc(1, sizeof(fi_tx_attr)));
  info->rx_attr = static_cast<fi_rx_attr*>(std::calloc(1, sizeof(fi_rx_attr)));
  info->ep_attr = static_cast<fi_ep_attr*>(std::calloc(1, sizeof(fi_ep_attr)));
  info->domain_attr = static_cast<fi_domain_attr*>(std::calloc(1, sizeof(fi_domain_attr)));
  info->fabric_attr = static_cast<fi_fabric_attr*>(std::calloc(1, sizeof(fi_fabric_attr)));
  return info;
}

// As fi_freeinfo(): with all that follow.
inline void free_info(fi_info* info) {
  while (info != nullptr) {
    fi_info* next = info->next;
    if (info->domain_attr != nullptr) std::free(info->domain_attr->name);
    if (info->fabric_attr != nullptr) {
      std::free(info->fabric_attr->name);
      std::free(info->fabric_attr->prov_name);
    }
    for (void* part : {static_cast<void*>(info->tx_attr), static_cast<void*>(info->rx_attr),
                       static_cast<void*>(info->ep_attr), static_cast<void*>(info->domain_attr),
                       static_cast<void*>(info->fabric_attr), static_cast<void*>(info)}) {
      std::free(part);
    }
    info = next;
  }
}

// As fi_dupinfo().
inline fi_info* duplicate_info(const fi_info* info) {
  fi_info* made = new_info();
  if (info == nullptr) return made;
  fi_info parts = *made;
  *made = *info;
  made->next = nullptr;
  made->tx_attr = parts.tx_attr;
  made->rx_attr = parts.rx_attr;
  made->ep_attr = parts.ep_attr;
  made->domain_attr = parts.domain_attr;
  made->fabric_attr = parts.fabric_attr;
  *made->tx_attr = *info->tx_attr;
  *made->rx_attr = *info->rx_attr;
  *made->ep_attr = *info->ep_attr;
  *made->domain_attr = *info->domain_attr;
  *made->fabric_attr = *info->fabric_attr;
  made->domain_attr->name = copy(info->domain_attr->name);
  made->fabric_attr->name = copy(info->fabric_attr->name);
  made->fabric_attr->prov_name = copy(info->fabric_attr->prov_name);
  return made;
}

}  // namespace smddp::own_libfabric
