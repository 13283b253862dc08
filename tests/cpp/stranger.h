// A process that is no member of the job: it knows where a rank's endpoint listens, and the constants of
// the protocol. It speaks libfabric itself, so it may do what the endpoint's own classes never do.
#pragma once

#include <gtest/gtest.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/ofi/address.h"
#include "transport/ofi/endpoint.h"
#include "transport/ofi/provider.h"

namespace smddp {

// One endpoint of a stranger, connected to one rank. A provider that refuses what it sends may break the
// connection: then works() is false, and the stranger opens another.
class Stranger {
 public:
  explicit Stranger(const std::vector<uint8_t>& victim,
                    const ofi::Options& options = ofi::options_from_env()) {
    auto library = ofi::load_library(options.library);
    if (!library) return;
    library_ = library.value();
    auto choices = ofi::choose(library_, options);
    if (!choices) return;
    choices_ = std::move(choices.value());
    works_ = open(*choices_[0][0].info, victim);
  }
  ~Stranger() {
    for (fid* object : {of(ep_), of(cq_), of(av_), of(domain_), of(fabric_)}) {
      if (object != nullptr) ::fi_close(object);
    }
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  bool works() const { return works_; }
  uint64_t sent() const { return sent_; }

  // A write of `bytes` bytes with immediate data, by a key that was never granted.
  void write(uint32_t immediate, size_t bytes, uint64_t address, uint64_t key) {
    count(::fi_writedata(ep_, memory_.data(), bytes, nullptr, immediate, to_, address, key, this));
  }
  // A write to nowhere, for which nobody checks a key, with immediate data.
  void write_nothing(uint32_t immediate) {
    fi_msg_rma message = {nullptr, nullptr, 0, to_, nullptr, 0, this, immediate};
    count(::fi_writemsg(ep_, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION));
  }
  void send(std::span<const std::byte> message) {
    std::memcpy(memory_.data(), message.data(), message.size());
    count(::fi_send(ep_, memory_.data(), message.size(), nullptr, to_, this));
  }
  // Lets the provider move; false once it has answered with an error.
  bool progress() {
    fi_cq_data_entry entries[16];
    for (int i = 0; i < 4; ++i) {
      ssize_t n = ::fi_cq_read(cq_, entries, 16);
      if (n == -FI_EAGAIN) break;
      if (n >= 0) {
        outstanding_ -= static_cast<size_t>(n);
        continue;
      }
      fi_cq_err_entry error = {};
      (void)::fi_cq_readerr(cq_, &error, 0);
      works_ = false;
      break;
    }
    return works_;
  }
  size_t outstanding() const { return outstanding_; }

 private:
  template <class T>
  static fid* of(T* object) {
    return object == nullptr ? nullptr : &object->fid;
  }
  void count(ssize_t rc) {
    sent_ += rc == 0;
    outstanding_ += rc == 0;
    if (rc != 0 && rc != -FI_EAGAIN) works_ = false;
  }
  bool open(fi_info& info, const std::vector<uint8_t>& victim) {
    fi_av_attr av = {};
    av.type = info.domain_attr->av_type == FI_AV_MAP ? FI_AV_MAP : FI_AV_TABLE;
    fi_cq_attr cq = {};
    cq.format = FI_CQ_FORMAT_DATA;
    if (library_.fabric(info.fabric_attr, &fabric_, nullptr) != 0 ||
        ::fi_domain(fabric_, &info, &domain_, nullptr) != 0 ||
        ::fi_av_open(domain_, &av, &av_, nullptr) != 0 ||
        ::fi_cq_open(domain_, &cq, &cq_, nullptr) != 0 ||
        ::fi_endpoint(domain_, &info, &ep_, nullptr) != 0 ||
        ::fi_ep_bind(ep_, &cq_->fid, FI_TRANSMIT | FI_RECV) != 0 ||
        ::fi_ep_bind(ep_, &av_->fid, 0) != 0 || ::fi_enable(ep_) != 0) {
      return false;
    }
    size_t size = 0;
    (void)::fi_getname(&ep_->fid, nullptr, &size);
    auto published = ofi::unpack_address(info, victim, size);
    return published.ok() &&
           ::fi_av_insert(av_, published.value().names[0].data(), 1, &to_, 0, nullptr) == 1;
  }

  ofi::Library library_;
  std::vector<ofi::RailChoices> choices_;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* av_ = nullptr;
  fid_cq* cq_ = nullptr;
  fid_ep* ep_ = nullptr;
  fi_addr_t to_ = FI_ADDR_UNSPEC;
  std::vector<std::byte> memory_ = std::vector<std::byte>(256 << 10, std::byte{0x5a});
  size_t outstanding_ = 0;
  uint64_t sent_ = 0;
  bool works_ = false;
};

}  // namespace smddp
