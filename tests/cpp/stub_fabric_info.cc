// What a test sets of the stub of libfabric, and what it offers: the lists of fi_getinfo().
#include <rdma/fabric.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "stub_fabric.h"

namespace stub {

STUB_SYMBOL State* stub_state() {
  static State only;
  return &only;
}

namespace {

struct Info : fi_info {
  Info() : fi_info{} { point_to_own(); }
  explicit Info(const fi_info& from)
      : fi_info(from),
        tx(*from.tx_attr),
        rx(*from.rx_attr),
        ep(*from.ep_attr),
        domain(*from.domain_attr),
        fabric(*from.fabric_attr) {
    next = nullptr;
    point_to_own();
    for (char** name : {&domain.name, &fabric.name, &fabric.prov_name})
      if (*name != nullptr) *name = ::strdup(*name);
  }
  ~Info() {
    for (char* name : {domain.name, fabric.name, fabric.prov_name}) std::free(name);
  }
  Info& operator=(const Info&) = delete;

  fi_tx_attr tx = {};
  fi_rx_attr rx = {};
  fi_ep_attr ep = {};
  fi_domain_attr domain = {};
  fi_fabric_attr fabric = {};

 private:
  void point_to_own() {
    tx_attr = &tx;
    rx_attr = &rx;
    ep_attr = &ep;
    domain_attr = &domain;
    fabric_attr = &fabric;
  }
};

Info* offer_of(const std::string& domain, bool device_memory) {
  const Settings& settings = state().settings;
  auto* info = new Info();
  info->caps = FI_MSG | FI_SEND | FI_RECV;
  if (!settings.messages_only)
    info->caps |= FI_RMA | FI_WRITE | FI_REMOTE_WRITE | FI_READ | FI_REMOTE_READ;
  if (device_memory) info->caps |= FI_HMEM;
  info->mode = settings.consumes_receives ? FI_RX_CQ_DATA : 0;
  info->addr_format = FI_ADDR_EFA;
  info->rx.size = info->tx.size = 512;
  if (settings.orders_messages) info->rx.msg_order = info->tx.msg_order = FI_ORDER_SAW;
  info->ep.type = FI_EP_RDM;
  info->ep.protocol = FI_PROTO_EFA;
  info->ep.max_msg_size = SIZE_MAX;
  info->domain.name = ::strdup(domain.c_str());
  info->domain.mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED;
  if (settings.provider_keys) info->domain.mr_mode |= FI_MR_PROV_KEY;
  if (device_memory) info->domain.mr_mode |= FI_MR_HMEM;
  info->domain.mr_key_size = info->domain.cq_data_size = 4;
  info->domain.av_type = FI_AV_TABLE;
  info->fabric.name = ::strdup(settings.provider.c_str());
  info->fabric.prov_name = ::strdup(settings.provider.c_str());
  return info;
}

}  // namespace

STUB_SYMBOL void fi_freeinfo(fi_info* info) {
  while (info != nullptr) delete static_cast<Info*>(std::exchange(info, info->next));
}

STUB_SYMBOL fi_info* fi_dupinfo(const fi_info* info) {
  return info != nullptr ? new Info(*info) : new Info();
}

STUB_SYMBOL int fi_getinfo(uint32_t, const char*, const char*, uint64_t, const fi_info* hints,
                           fi_info** out) {
  const Settings& settings = state().settings;
  *out = nullptr;
  bool device_memory = (hints->caps & FI_HMEM) != 0;
  if (device_memory && (hints->domain_attr->mr_mode & FI_MR_HMEM) == 0)
    violation("FI_HMEM without FI_MR_HMEM");
  const char* wanted = hints->fabric_attr->prov_name;
  if ((device_memory && !settings.device_memory) ||
      (settings.messages_only && (hints->caps & FI_RMA) != 0) ||
      (wanted != nullptr && settings.provider != wanted)) {
    return -FI_ENODATA;
  }
  fi_info** at = out;
  for (const std::string& domain : settings.domains) {
    Info* info = offer_of(domain, device_memory);
    *at = info;
    at = &info->next;
    // What a caller must do for the provider it has to offer.
    if ((info->domain.mr_mode & ~hints->domain_attr->mr_mode) != 0 ||
        (info->mode & ~hints->mode) != 0) {
      fi_freeinfo(std::exchange(*out, nullptr));
      return -FI_ENODATA;
    }
  }
  return 0;
}

}  // namespace stub
