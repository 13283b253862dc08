// Opening a rail: libfabric's objects in the order that it asks for, the address, the receive
// buffers.
#include <rdma/fi_cm.h>
#include <rdma/fi_ext.h>

#include <algorithm>
#include <string_view>

#include "common/log.h"
#include "transport/ofi/address.h"
#include "transport/ofi/rail.h"

namespace smddp::ofi {
namespace {

// Entries for the completions that may be outstanding at once, and 256 more for writes by peers and
// for errors of the provider's own.
constexpr size_t kQueue = kReceives + kMostRequests + 256;
// FI_OPT_EFA_EMULATED_WRITE, which is newer than the oldest headers this builds with.
constexpr int kEfaEmulatedWrite = FI_OPT_EFA_RNR_RETRY + 2;
constexpr size_t kEfaRetryForever = 7;
// FI_OPT_CUDA_API_PERMITTED, which is newer as well.
constexpr int kCudaPermitted = FI_OPT_XPU_TRIGGER + 1;

Status failed(const Library& library, const char* call, int rc) {
  return Status(Code::kUnavailable, std::string(call) + ": " + library.error_text(rc));
}

}  // namespace

Result<std::unique_ptr<Rail>> Rail::open(const Library& library, const Choice& choice,
                                         uint8_t index, fi_wait_obj wait, size_t max_message,
                                         Counters* counters) {
  std::unique_ptr<Rail> rail(new Rail(library, index, max_message));
  Status status = rail->set_up(choice, wait, counters);
  if (!status) return status;
  return rail;
}

Status Rail::set_up(const Choice& choice, fi_wait_obj wait, Counters* counters) {
  info_ = own(library_, library_.dupinfo(choice.info.get()));
  if (!info_) return Status(Code::kUnavailable, "libfabric is out of memory");
  text_ = choice.offer.text();
  consumes_receives_ = ((info_->mode | info_->rx_attr->mode) & FI_RX_CQ_DATA) != 0;
  Status s = open_domain();
  if (s) s = open_address_vector();
  if (s) s = open_queue(wait);
  if (s) s = open_endpoint();
  if (s && wait == FI_WAIT_FD) s = read_wait_fd();
  if (!s) return s;
  registrations_ = std::make_unique<Registrations>(registrar(), counters);
  s = read_name();
  return s ? cut_receives() : s;
}

Status Rail::open_domain() {
  Status s = open_handle(fabric_, library_, "fi_fabric", [&](fid_fabric** raw) {
    return library_.fabric(info_->fabric_attr, raw, nullptr);
  });
  if (!s) return s;
  return open_handle(domain_, library_, "fi_domain", [&](fid_domain** raw) {
    return ::fi_domain(fabric_.get(), info_.get(), raw, nullptr);
  });
}

Status Rail::open_address_vector() {
  return open_handle(av_, library_, "fi_av_open", [&](fid_av** raw) {
    fi_av_attr attr = {};
    attr.type = info_->domain_attr->av_type == FI_AV_MAP ? FI_AV_MAP : FI_AV_TABLE;
    attr.count = 64;
    return ::fi_av_open(domain_.get(), &attr, raw, nullptr);
  });
}

Status Rail::open_queue(fi_wait_obj wait) {
  return open_handle(cq_, library_, "fi_cq_open", [&](fid_cq** raw) {
    fi_cq_attr attr = {};
    attr.size = kQueue;
    attr.format = FI_CQ_FORMAT_DATA;
    attr.wait_obj = wait;
    return ::fi_cq_open(domain_.get(), &attr, raw, nullptr);
  });
}

// The provider's options come after the bindings and before fi_enable.
Status Rail::open_endpoint() {
  Status opened = open_handle(ep_, library_, "fi_endpoint", [&](fid_ep** raw) {
    return ::fi_endpoint(domain_.get(), info_.get(), raw, nullptr);
  });
  if (!opened) return opened;
  if (int rc = ::fi_ep_bind(ep_.get(), &cq_->fid, FI_TRANSMIT | FI_RECV); rc != 0) {
    return failed(library_, "fi_ep_bind of the completion queue", rc);
  }
  if (int rc = ::fi_ep_bind(ep_.get(), &av_->fid, 0); rc != 0) {
    return failed(library_, "fi_ep_bind of the address vector", rc);
  }
  if (std::string_view(info_->fabric_attr->prov_name) == "efa") set_efa_options();
  if ((info_->caps & FI_HMEM) != 0) forbid_cuda();
  if (int rc = ::fi_enable(ep_.get()); rc != 0) return failed(library_, "fi_enable", rc);
  return Status();
}

Status Rail::read_wait_fd() {
  if (int rc = ::fi_control(&cq_->fid, FI_GETWAIT, &wait_fd_); rc != 0) {
    return failed(library_, "fi_control FI_GETWAIT", rc);
  }
  loses_wakeups_ = std::string_view(info_->fabric_attr->prov_name).ends_with("ofi_rxm");
  return Status();
}

// A copy by CUDA's driver may wait for streams that wait for this very thread: fi_endpoint(3),
// "CUDA deadlock" in fabric(7). A provider that can't do without such copies is not given GPUs'
// memory.
void Rail::forbid_cuda() {
  bool permitted = false;
  int rc = ::fi_setopt(&ep_->fid, FI_OPT_ENDPOINT, kCudaPermitted, &permitted, sizeof permitted);
  reaches_devices_ = rc == 0;
  if (rc == 0) return;
  log(LogLevel::kInfo, "fabric: " + text_ +
                           " does not move GPUs' memory, because it can't without CUDA's " +
                           "copies: " + library_.error_text(rc));
}

void Rail::set_efa_options() {
  // A receiver that posts its buffers late is not dead. After fi_enable the endpoint accepts no
  // other value.
  size_t retry = kEfaRetryForever;
  int rc = ::fi_setopt(&ep_->fid, FI_OPT_ENDPOINT, FI_OPT_EFA_RNR_RETRY, &retry, sizeof retry);
  if (rc != 0) {
    log(LogLevel::kInfo, "fabric: FI_OPT_EFA_RNR_RETRY is not taken: " + library_.error_text(rc));
  }
  // A library that is too old to know this option has device RDMA off.
  bool emulated = true;
  size_t size = sizeof emulated;
  rc = ::fi_getopt(&ep_->fid, FI_OPT_ENDPOINT, kEfaEmulatedWrite, &emulated, &size);
  emulates_writes_ = rc != 0 || emulated;
}

Status Rail::read_name() {
  size_t size = 0;
  int rc = ::fi_getname(&ep_->fid, nullptr, &size);
  if (rc != 0 && rc != -FI_ETOOSMALL) return failed(library_, "fi_getname", rc);
  name_.resize(size);
  rc = ::fi_getname(&ep_->fid, name_.data(), &size);
  if (rc != 0) return failed(library_, "fi_getname", rc);
  name_.resize(size);
  replace_wildcard(name_, info_->src_addr, info_->src_addrlen);
  return Status();
}

Registrar Rail::registrar() const { return {library_, domain_.get(), *info_}; }

Result<MrHandle> Rail::pin(const Mapping& slab, uint64_t access) {
  auto mr = registrar().open(slab.data(), slab.size(), access);
  // Pinned pages must stay the parent's when the process forks. A child that shared them could make
  // the kernel give the parent a copy of a page, while the device goes on using the old one.
  if (mr && ::madvise(slab.data(), slab.size(), MADV_DONTFORK) != 0) {
    log(LogLevel::kInfo, "fabric: message buffers are not protected from fork");
  }
  return mr;
}

Status Rail::adopt(const Mapping& sends) {
  if (!local_registration()) return Status();
  return pin(sends, FI_SEND | FI_WRITE).into(sends_mr_);
}

Status Rail::cut_receives() {
  size_t receives = std::clamp<size_t>(info_->rx_attr->size, 1, kReceives);
  Result<Mapping> slab = Mapping::map(receives * max_message_, MAP_PRIVATE);
  if (!slab) return slab.status();
  MrHandle mr;
  if (local_registration()) {
    if (Status s = pin(slab.value(), FI_RECV).into(mr); !s) return s;
  }
  return receives_status(receives_.post_all(ep_.get(), index_, std::move(slab.value()),
                                            std::move(mr), receives, max_message_));
}

Status Rail::receives_status(int rc) const {
  if (rc == 0) return Status();
  return Status(Code::kUnavailable, "fi_recv: " + library_.error_text(rc) + " (" + text_ + ")");
}

Result<fi_addr_t> Rail::insert(std::span<const uint8_t> name) {
  fi_addr_t inserted = FI_ADDR_UNSPEC;
  int rc = ::fi_av_insert(av_.get(), name.data(), 1, &inserted, 0, nullptr);
  if (rc == 1) return inserted;
  return Status(Code::kInvalid, "fi_av_insert refused a peer's address: " +
                                    (rc < 0 ? library_.error_text(rc) : "it is damaged"));
}

}  // namespace smddp::ofi
