#include "fabric/rail/mr_cache.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>

#include "common/unguessable.h"

namespace smddp::fabric {
namespace {

constexpr int kKeyTries = 8;  // random keys may collide if a provider has few bits for them

uint64_t access_flags(Access access) {
  switch (access) {
    case Access::kSend:
      return FI_SEND | FI_WRITE;
    case Access::kReceive:
      return FI_RECV;
    case Access::kRead:
      return FI_READ;
    case Access::kRemoteWrite:
      return FI_REMOTE_WRITE;
  }
  return 0;
}

// For a device's memory, after fi_mr_regattr(3). A region there is also read, by flush reads.
fi_mr_attr attributes(const iovec& memory, uint64_t access, uint64_t key,
                      const MemoryOwner& owner) {
  fi_mr_attr attr = {};
  attr.mr_iov = &memory;
  attr.iov_count = 1;
  attr.access = access | ((access & FI_REMOTE_WRITE) != 0 ? FI_REMOTE_READ : 0);
  attr.requested_key = key;
  attr.iface = owner.kind == MemoryOwner::Kind::kCuda ? FI_HMEM_CUDA : FI_HMEM_SYSTEM;
  if (attr.iface == FI_HMEM_CUDA) attr.device.cuda = owner.ordinal;
  return attr;
}

}  // namespace

MrCache::MrCache(const Library& library, fid_domain* domain, fid_ep* endpoint, const fi_info& info,
                 size_t bound, Counters* counters)
    : library_(library),
      domain_(domain),
      endpoint_((info.domain_attr->mr_mode & FI_MR_ENDPOINT) != 0 ? endpoint : nullptr),
      pins_((info.domain_attr->mr_mode & FI_MR_ALLOCATED) != 0),
      provider_keys_((info.domain_attr->mr_mode & FI_MR_PROV_KEY) != 0),
      key_mask_(info.domain_attr->mr_key_size >= 8
                    ? ~uint64_t{0}
                    : (uint64_t{1} << 8 * info.domain_attr->mr_key_size) - 1),
      bound_(pins_ ? 0 : bound),
      counters_(counters) {}

Result<MrHandle> MrCache::open(const RegistrationKey& range, const Loan* loan) {
  auto [base, bytes, access] = range;
  int rc = 0;
  for (int attempt = 0; attempt < kKeyTries; ++attempt) {
    uint64_t wanted = provider_keys_ ? 0 : unguessable() & key_mask_;
    fid_mr* raw = nullptr;
    if (loan != nullptr) {
      iovec memory = {reinterpret_cast<void*>(base), bytes};
      fi_mr_attr attr = attributes(memory, access_flags(access), wanted, loan->owner);
      rc = ::fi_mr_regattr(domain_, &attr, 0, &raw);
    } else {
      rc = ::fi_mr_reg(domain_, reinterpret_cast<const void*>(base), bytes, access_flags(access), 0,
                       wanted, 0, &raw, nullptr);
    }
    if (rc == -FI_ENOKEY && !provider_keys_) continue;
    if (rc != 0) break;
    MrHandle mr(raw);
    if (endpoint_ != nullptr) {
      if (rc = ::fi_mr_bind(raw, &endpoint_->fid, 0); rc != 0) break;
      if (rc = ::fi_mr_enable(raw); rc != 0) break;
    }
    return mr;
  }
  return Status(Code::kUnavailable, std::string(loan != nullptr ? "fi_mr_regattr" : "fi_mr_reg") +
                                        " of " + std::to_string(bytes) +
                                        " bytes: " + library_.error_text(rc));
}

Registration* MrCache::take(const std::byte* data, size_t bytes, Access access) {
  uintptr_t base = reinterpret_cast<uintptr_t>(data);
  const Loan* loan = loan_of(data);
  bool exclusive = access == Access::kRemoteWrite && loan == nullptr;
  if (loan != nullptr) {
    base = reinterpret_cast<uintptr_t>(loan->at);
    bytes = loan->bytes;
  } else if (!exclusive) {
    uintptr_t page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    uintptr_t end = (base + bytes + page - 1) / page * page;
    base = base / page * page;
    bytes = end - base;
  }
  RegistrationKey range(base, bytes, access);
  auto [first, last] = table_.equal_range(range);
  for (auto at = first; at != last && !exclusive; ++at) {
    Registration& found = at->second;
    if (found.users++ == 0 && !found.lent) idle_.erase(found.idle);
    ++counters_->registration_hits;
    return &found;
  }
  Result<MrHandle> mr = open(range, loan);
  if (!mr) {
    error_ = mr.status();
    return nullptr;
  }
  ++counters_->registrations;
  auto made = table_.emplace(range, Registration{});
  Registration& registration = made->second;
  registration.mr = std::move(mr.value());
  registration.key = ::fi_mr_key(registration.mr.get());
  registration.users = 1;
  registration.lent = loan != nullptr;
  registration.self = made;
  return &registration;
}

void MrCache::give_back(Registration* registration) {
  if (--registration->users > 0 || registration->lent) return;
  bool exclusive = std::get<Access>(registration->self->first) == Access::kRemoteWrite;
  if (bound_ == 0 || exclusive) {
    table_.erase(registration->self);
    return;
  }
  registration->idle = idle_.insert(idle_.end(), registration);
  if (idle_.size() <= bound_) return;
  Registration* oldest = idle_.front();
  idle_.pop_front();
  table_.erase(oldest->self);
}

const MrCache::Loan* MrCache::loan_of(const std::byte* data) const {
  for (const Loan& loan : loans_) {
    if (data >= loan.at && data < loan.at + loan.bytes) return &loan;
  }
  return nullptr;
}

void MrCache::lend(const std::byte* at, size_t bytes, const MemoryOwner& owner) {
  loans_.push_back({at, bytes, owner});
}

// A registration that still has a user ends with its last user, or with the endpoint.
void MrCache::take_back(const std::byte* at) {
  auto loan = std::find_if(loans_.begin(), loans_.end(), [&](const Loan& l) { return l.at == at; });
  if (loan == loans_.end()) return;
  for (auto entry = table_.begin(); entry != table_.end();) {
    auto current = entry++;
    Registration& found = current->second;
    if (!found.lent || found.base() != reinterpret_cast<uintptr_t>(at)) continue;
    if (found.users == 0) {
      table_.erase(current);
    } else {
      found.lent = false;
    }
  }
  loans_.erase(loan);
}

}  // namespace smddp::fabric
