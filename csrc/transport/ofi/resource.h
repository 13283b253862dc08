// Owners of libfabric's objects and of message buffers: each closes its object exactly once.
// Declare them in the order of opening: the order of destruction is then the reverse one, which
// libfabric asks for. Used by the classes of this folder only.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "common/log.h"
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

// Runs an opening call `open(&raw)`. The owner of the object, or which call failed and why.
template <class Handle, class Open>
Result<Handle> open_handle(const Library& library, const char* call, Open&& open) {
  typename Handle::pointer raw = nullptr;
  int rc = open(&raw);
  if (rc == 0) return Handle(raw);
  return Status(Code::kUnavailable, std::string(call) + ": " + library.error_text(rc));
}

// Anonymous pages: zeroed, and not resident before they are first touched.
class Slab {
 public:
  Slab() = default;
  static Result<Slab> map(size_t bytes) {
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
      return Status(Code::kUnavailable,
                    "no memory for " + std::to_string(bytes) + " bytes of message buffers");
    }
    return Slab(static_cast<std::byte*>(base), bytes);
  }
  Slab(Slab&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Slab& operator=(Slab&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Slab() {
    if (base_ != nullptr) ::munmap(base_, bytes_);
  }
  std::byte* data() const { return base_; }
  size_t size() const { return bytes_; }

 private:
  Slab(std::byte* base, size_t bytes) : base_(base), bytes_(bytes) {}
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace smddp::ofi
