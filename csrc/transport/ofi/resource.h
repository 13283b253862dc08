// Owners of libfabric's objects: each closes its object exactly once.
// Declare them in the order of opening: the order of destruction is then the reverse one, which
// libfabric asks for. Used by the classes of this folder only.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <memory>
#include <string>

#include "common/log.h"
#include "common/mapping.h"
#include "transport/ofi/loader.h"

namespace smddp::ofi {

inline const char* kind(const fid_fabric*) { return "fabric"; }
inline const char* kind(const fid_domain*) { return "domain"; }
inline const char* kind(const fid_av*) { return "address vector"; }
inline const char* kind(const fid_cq*) { return "completion queue"; }
inline const char* kind(const fid_ep*) { return "endpoint"; }
inline const char* kind(const fid_mr*) { return "memory registration"; }

struct CloseFid {
  // ofi_rxm answers -FI_EBUSY for a domain in which a large message was cut off by a dying peer,
  // because it has lost count of its own registrations. At this point nothing can be done about it.
  template <class T>
  void operator()(T* object) const {
    int rc = ::fi_close(&object->fid);
    if (rc == 0) return;
    log(LogLevel::kInfo,
        std::string("fi_close of the ") + kind(object) + " returned " + std::to_string(rc));
  }
};

using FabricHandle = std::unique_ptr<fid_fabric, CloseFid>;
using DomainHandle = std::unique_ptr<fid_domain, CloseFid>;
using AvHandle = std::unique_ptr<fid_av, CloseFid>;
using CqHandle = std::unique_ptr<fid_cq, CloseFid>;
using EpHandle = std::unique_ptr<fid_ep, CloseFid>;
using MrHandle = std::unique_ptr<fid_mr, CloseFid>;

struct FreeInfo {
  decltype(&::fi_freeinfo) free = nullptr;
  void operator()(fi_info* info) const { free(info); }
};
using InfoHandle = std::unique_ptr<fi_info, FreeInfo>;

inline InfoHandle own(const Library& library, fi_info* info) {
  return InfoHandle(info, FreeInfo{library.freeinfo});
}

// Runs an opening call `open(&raw)` for the owner of the object. Not ok: which call failed and why.
template <class Handle, class Open>
Status open_handle(Handle& owner, const Library& library, const char* call, Open&& open) {
  typename Handle::pointer raw = nullptr;
  int rc = open(&raw);
  if (rc != 0) return {Code::kUnavailable, std::string(call) + ": " + library.error_text(rc)};
  owner = Handle(raw);
  return {};
}

}  // namespace smddp::ofi
