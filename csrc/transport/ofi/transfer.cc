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

// Over which messages go over sockets unless the user has set something: small collectives take 0.5 to 0.9 of the
// time then. Over the "tcp" of libfabric 2.5 they take as long as without
// (benchmarks/results/2026-11-26-own-sockets).
constexpr std::string_view kSlowMessages[] = {"tcp;ofi_rxm"};

template <class List>
bool contains(const List& list, std::string_view provider) {
  return std::find(std::begin(list), std::end(list), provider) != std::end(list);
}

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
                                          " can't do the SMDDP_FABRIC_TRANSFER asked for, '" +
                                          wanted + "'; leave it unset or ask for messages");
  }
  if (!wanted.empty()) {
    return Status(Code::kInvalid, "SMDDP_FABRIC_TRANSFER holds '" + wanted +
                                      "'; it may hold writes, tagged or messages");
  }
  if (!contains(kWriters, info.fabric_attr->prov_name)) return Transfer::kMessages;
  for (Transfer transfer : {Transfer::kWrites, Transfer::kTagged}) {
    if (can(info, emulated, transfer)) return transfer;
  }
  return Transfer::kMessages;
}

Result<bool> choose_sockets(const fi_info& info, bool ip, bool only_messages,
                            const std::string& wanted) {
  if (wanted == "libfabric") return false;
  if (wanted.empty())
    return ip && !only_messages && contains(kSlowMessages, info.fabric_attr->prov_name);
  if (wanted != "sockets") {
    return Status(Code::kInvalid,
                  "SMDDP_FABRIC_MESSAGES holds '" + wanted + "'; it may hold sockets or libfabric");
  }
  if (ip) return true;
  return Status(Code::kUnavailable, std::string("provider ") + info.fabric_attr->prov_name +
                                        " has no IP addresses, which SMDDP_FABRIC_MESSAGES=sockets "
                                        "needs; leave it unset or ask for libfabric");
}

}  // namespace smddp::fabric
