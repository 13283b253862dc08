// Opening an endpoint: library, offer, libfabric's objects, buffers.
#include <rdma/fi_cm.h>

#include <algorithm>
#include <string_view>

#include "common/env.h"
#include "common/log.h"
#include "common/signals.h"
#include "fabric/address.h"
#include "fabric/rdm_endpoint.h"

namespace smddp::fabric {
namespace {

// Completions that may be outstanding at once, and some for errors of the provider's own.
constexpr size_t kQueue = kReceives + kDataSends + kControlSends + 32;

Status failed(const Library& library, const char* call, int rc) {
  return Status(Code::kUnavailable, std::string(call) + ": " + library.error_text(rc));
}

}  // namespace

Options options_from_env() {
  return {"", env::get("FABRIC_PROVIDER"), env::get("FABRIC_INTERFACE")};
}

Result<std::unique_ptr<Endpoint>> Endpoint::open(const Options& options) {
  KeepSignalHandlers keep;  // psm's library takes SIGINT, SIGSEGV and others when it is loaded
  Result<Library> library = load_library(options.library);
  if (!library) return library.status();
  Result<std::vector<Choice>> choices = choose(library.value(), options);
  if (!choices) return choices.status();
  Status first;  // why the best offer can't be had
  for (const Choice& choice : choices.value()) {
    auto built = RdmEndpoint::build(library.value(), choice, FI_WAIT_FD);
    if (!built) built = RdmEndpoint::build(library.value(), choice, FI_WAIT_NONE);
    if (built) {
      if (!first) log(LogLevel::kWarning, first.message() + "; using " + choice.offer.text());
      log(LogLevel::kInfo, "fabric: " + built.value()->description());
      return std::unique_ptr<Endpoint>(std::move(built.value()));
    }
    if (first.ok()) {
      first = Status(Code::kUnavailable,
                     choice.offer.text() + " can't be opened (" + built.status().message() + ")");
    }
  }
  return Status(Code::kUnavailable, first.message() +
                                        "; name another in SMDDP_FABRIC_PROVIDER or "
                                        "SMDDP_FABRIC_INTERFACE");
}

Result<std::unique_ptr<RdmEndpoint>> RdmEndpoint::build(const Library& library,
                                                        const Choice& choice, fi_wait_obj wait) {
  std::unique_ptr<RdmEndpoint> endpoint(new RdmEndpoint(library));
  Status status = endpoint->set_up(choice, wait);
  if (!status) return status;
  return endpoint;
}

Status RdmEndpoint::set_up(const Choice& choice, fi_wait_obj wait) {
  info_ = own(library_, library_.dupinfo(choice.info.get()));
  if (!info_) return Status(Code::kUnavailable, "libfabric is out of memory");
  max_message_ = std::min(kMaxMessage, info_->ep_attr->max_msg_size / 64 * 64);
  if (max_message_ < kControlMessage) {
    return Status(
        Code::kUnavailable,
        "its messages hold " + std::to_string(info_->ep_attr->max_msg_size) + " bytes, too few");
  }
  description_ = choice.offer.text() + ", libfabric " + library_.version_text();
  if (Status status = open_objects(wait); !status) return status;
  if (Status status = read_address(); !status) return status;
  return cut_buffers();
}

Status RdmEndpoint::open_objects(fi_wait_obj wait) {
  auto fabric = open_handle<FabricHandle>(library_, "fi_fabric", [&](fid_fabric** raw) {
    return library_.fabric(info_->fabric_attr, raw, nullptr);
  });
  if (!fabric) return fabric.status();
  fabric_ = std::move(fabric.value());

  auto domain = open_handle<DomainHandle>(library_, "fi_domain", [&](fid_domain** raw) {
    return ::fi_domain(fabric_.get(), info_.get(), raw, nullptr);
  });
  if (!domain) return domain.status();
  domain_ = std::move(domain.value());

  auto av = open_handle<AvHandle>(library_, "fi_av_open", [&](fid_av** raw) {
    fi_av_attr attr = {};
    attr.type = info_->domain_attr->av_type == FI_AV_MAP ? FI_AV_MAP : FI_AV_TABLE;
    attr.count = 64;
    return ::fi_av_open(domain_.get(), &attr, raw, nullptr);
  });
  if (!av) return av.status();
  av_ = std::move(av.value());

  auto cq = open_handle<CqHandle>(library_, "fi_cq_open", [&](fid_cq** raw) {
    fi_cq_attr attr = {};
    attr.size = kQueue;
    attr.format = FI_CQ_FORMAT_MSG;
    attr.wait_obj = wait;
    return ::fi_cq_open(domain_.get(), &attr, raw, nullptr);
  });
  if (!cq) return cq.status();
  cq_ = std::move(cq.value());

  auto ep = open_handle<EpHandle>(library_, "fi_endpoint", [&](fid_ep** raw) {
    return ::fi_endpoint(domain_.get(), info_.get(), raw, nullptr);
  });
  if (!ep) return ep.status();
  ep_ = std::move(ep.value());

  if (int rc = ::fi_ep_bind(ep_.get(), &cq_->fid, FI_SEND | FI_RECV); rc != 0) {
    return failed(library_, "fi_ep_bind of the completion queue", rc);
  }
  if (int rc = ::fi_ep_bind(ep_.get(), &av_->fid, 0); rc != 0) {
    return failed(library_, "fi_ep_bind of the address vector", rc);
  }
  if (int rc = ::fi_enable(ep_.get()); rc != 0) return failed(library_, "fi_enable", rc);
  if (wait == FI_WAIT_FD) {
    if (int rc = ::fi_control(&cq_->fid, FI_GETWAIT, &wait_fd_); rc != 0) {
      return failed(library_, "fi_control FI_GETWAIT", rc);
    }
    loses_wakeups_ = std::string_view(info_->fabric_attr->prov_name).ends_with("ofi_rxm");
  }
  return Status();
}

Status RdmEndpoint::read_address() {
  size_t size = 0;
  int rc = ::fi_getname(&ep_->fid, nullptr, &size);
  if (rc != 0 && rc != -FI_ETOOSMALL) return failed(library_, "fi_getname", rc);
  std::vector<uint8_t> name(size);
  rc = ::fi_getname(&ep_->fid, name.data(), &size);
  if (rc != 0) return failed(library_, "fi_getname", rc);
  name.resize(size);
  replace_wildcard(name, info_->src_addr, info_->src_addrlen);
  name_size_ = size;
  address_ = pack_address(*info_, name);
  return Status();
}

Status RdmEndpoint::cut_buffers() {
  size_t receives = std::clamp<size_t>(info_->rx_attr->size, 1, kReceives);
  Result<Slab> slab =
      Slab::map((receives + kDataSends) * max_message_ + kControlSends * kControlMessage);
  if (!slab) return slab.status();
  slab_ = std::move(slab.value());
  if ((info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0) {
    auto mr = open_handle<MrHandle>(library_, "fi_mr_reg", [&](fid_mr** raw) {
      return ::fi_mr_reg(domain_.get(), slab_.data(), slab_.size(), FI_SEND | FI_RECV, 0, 0, 0, raw,
                         nullptr);
    });
    if (!mr) return mr.status();
    mr_ = std::move(mr.value());
    // Pinned pages must stay the parent's when the process forks: without them the child can't make
    // the kernel copy one away from under the device.
    if (::madvise(slab_.data(), slab_.size(), MADV_DONTFORK) != 0) {
      log(LogLevel::kInfo, "fabric: message buffers are not protected from fork");
    }
  }
  receives_.resize(receives);
  sends_.resize(kDataSends + kControlSends);
  unposted_.reserve(receives);
  std::byte* at = slab_.data();
  for (size_t i = 0; i < sends_.size(); ++i) {
    SendSlot& slot = sends_[i];
    slot.is_send = true;
    slot.control = i >= kDataSends;
    slot.data = at;
    slot.capacity = slot.control ? kControlMessage : max_message_;
    at += slot.capacity;
    free_[slot.control].push(&slot);
  }
  for (ReceiveSlot& slot : receives_) {
    slot.data = at;
    at += max_message_;
    post_receive(&slot);
  }
  return broken_;
}

}  // namespace smddp::fabric
