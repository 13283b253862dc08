#include "fabric/transfer.h"

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <algorithm>
#include <iterator>
#include <string_view>

namespace smddp::fabric {
namespace {

// By name, as far as it was measured; what is not listed has messages only.
struct Default {
  std::string_view provider;
  Transfer transfer;
};
constexpr Default kDefaults[] = {
    {"tcp;ofi_rxm", Transfer::kWrites},
};

constexpr size_t kImmediateBytes = 4;

bool can(const fi_info& info, Transfer transfer) {
  switch (transfer) {
    case Transfer::kMessages:
      return true;
    case Transfer::kTagged:
      return (info.caps & FI_TAGGED) != 0;
    case Transfer::kWrites:
      // A Grant has room for keys of 64 bits.
      return (info.caps & FI_RMA) != 0 && info.domain_attr->cq_data_size >= kImmediateBytes &&
             (info.domain_attr->mr_mode & FI_MR_RAW) == 0 &&
             info.domain_attr->mr_key_size <= sizeof(uint64_t);
  }
  return false;
}

}  // namespace

const char* name_of(Transfer transfer) {
  switch (transfer) {
    case Transfer::kMessages:
      return "messages";
    case Transfer::kTagged:
      return "tagged";
    case Transfer::kWrites:
      return "writes";
  }
  return "";
}

Result<Transfer> choose_transfer(const fi_info& info, const std::string& wanted) {
  for (Transfer transfer : {Transfer::kMessages, Transfer::kTagged, Transfer::kWrites}) {
    if (wanted != name_of(transfer)) continue;
    if (can(info, transfer)) return transfer;
    return Status(Code::kUnavailable, std::string("provider ") + info.fabric_attr->prov_name +
                                          " can't do the SMDDP_FABRIC_TRANSFER asked for, '" +
                                          wanted + "'; leave it unset or ask for messages");
  }
  if (!wanted.empty()) {
    return Status(Code::kInvalid, "SMDDP_FABRIC_TRANSFER holds '" + wanted +
                                      "'; it may hold writes, tagged or messages");
  }
  auto known = std::find_if(std::begin(kDefaults), std::end(kDefaults), [&](const Default& d) {
    return d.provider == info.fabric_attr->prov_name;
  });
  if (known == std::end(kDefaults) || !can(info, known->transfer)) return Transfer::kMessages;
  return known->transfer;
}

}  // namespace smddp::fabric
