#include "transport/ofi/transfer.h"

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <algorithm>
#include <iterator>
#include <string_view>

namespace smddp::fabric {
namespace {

// Providers that move chunks by writes unless they are told otherwise. The providers over tcp were
// measured with benchmarks/fabric.cc over loopback (libfabric 1.17 and 2.5): from 64 KiB on both
// kinds of chunks are faster than messages. Writes are ahead of tagged messages up to 256 KiB over
// ofi_rxm and at 256 KiB over the others; above that the two are equal within the noise. Over
// udp;ofi_rxd, which is not listed, neither kind gains anything. efa and verbs could not be
// measured: there a write saves a copy and a matching receive.
constexpr std::string_view kWriters[] = {"tcp", "tcp;ofi_rxm", "net", "efa", "verbs;ofi_rxm"};

bool can(const fi_info& info, bool emulated, Transfer transfer) {
  switch (transfer) {
    case Transfer::kMessages:
      return true;
    case Transfer::kTagged:
      return (info.caps & FI_TAGGED) != 0;
    case Transfer::kWrites:
      // A Grant holds keys of 64 bits.
      return !emulated && (info.caps & FI_RMA) != 0 &&
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

Result<Transfer> choose_transfer(const fi_info& info, bool emulated, const std::string& wanted) {
  for (Transfer transfer : {Transfer::kMessages, Transfer::kTagged, Transfer::kWrites}) {
    if (wanted != name_of(transfer)) continue;
    if (can(info, emulated, transfer)) return transfer;
    return Status(Code::kUnavailable, std::string("provider ") + info.fabric_attr->prov_name +
                                          " can't do the transfer of SMDDP_DEBUG, '" + wanted +
                                          "'; leave it unset or ask for messages");
  }
  if (!wanted.empty()) {
    return Status(Code::kInvalid, "transfer in SMDDP_DEBUG is '" + wanted +
                                      "'; it may hold writes, tagged or messages");
  }
  const std::string_view provider = info.fabric_attr->prov_name;
  if (std::find(std::begin(kWriters), std::end(kWriters), provider) == std::end(kWriters))
    return Transfer::kMessages;
  for (Transfer transfer : {Transfer::kWrites, Transfer::kTagged}) {
    if (can(info, emulated, transfer)) return transfer;
  }
  return Transfer::kMessages;
}

}  // namespace smddp::fabric
