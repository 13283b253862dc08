#include "transport/ofi/registrations.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <string>

#include "common/exceptions.h"
#include "common/random.h"

namespace smddp::ofi {
namespace {

constexpr int kKeyTries = 8;  // random keys may collide if a provider has few bits for them

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

uint64_t access_flags(Access access) {
  constexpr uint64_t kFlags[] = {FI_SEND | FI_WRITE, FI_READ, FI_REMOTE_WRITE};  // by Access
  return kFlags[static_cast<size_t>(access)];
}

}  // namespace

Registrar::Registrar(const Library& library, fid_domain* domain, const fi_info& info)
    : library_(library),
      domain_(domain),
      provider_keys_((info.domain_attr->mr_mode & FI_MR_PROV_KEY) != 0),
      key_mask_(info.domain_attr->mr_key_size >= 8
                    ? ~uint64_t{0}
                    : (uint64_t{1} << 8 * info.domain_attr->mr_key_size) - 1) {}

Result<MrHandle> Registrar::open(const void* base, size_t bytes, uint64_t access,
                                 const MemoryOwner* owner) const {
  int rc = 0;
  for (int attempt = 0; attempt < kKeyTries; ++attempt) {
    uint64_t wanted = 0;
    if (!provider_keys_ && !draw_number(&wanted))
      return Status(Code::kUnavailable, "the kernel gives no random numbers for keys of memory");
    wanted &= key_mask_;
    fid_mr* raw = nullptr;
    if (owner != nullptr) {
      iovec memory = {const_cast<void*>(base), bytes};
      fi_mr_attr attr = attributes(memory, access, wanted, *owner);
      rc = ::fi_mr_regattr(domain_, &attr, 0, &raw);
    } else {
      rc = ::fi_mr_reg(domain_, base, bytes, access, 0, wanted, 0, &raw, nullptr);
    }
    if (rc == -FI_ENOKEY && !provider_keys_) continue;
    if (rc != 0) break;
    return MrHandle(raw);
  }
  return Status(Code::kUnavailable, std::string(owner != nullptr ? "fi_mr_regattr" : "fi_mr_reg") +
                                        " of " + std::to_string(bytes) +
                                        " bytes: " + library_.error_text(rc));
}

MrHandle Registrar::open_again(uint64_t key, const void* base, size_t bytes,
                               uint64_t access) const {
  fid_mr* raw = nullptr;
  bool opened =
      !provider_keys_ && ::fi_mr_reg(domain_, base, bytes, access, 0, key, 0, &raw, nullptr) == 0;
  return MrHandle(opened ? raw : nullptr);
}

bool Registrations::divert(Registration* registration, const std::byte* to, size_t bytes) {
  registration->mr = MrHandle();
  registration->mr =
      registrar_.open_again(registration->key, to, bytes, access_flags(Access::kRemoteWrite));
  return registration->mr != nullptr;
}

Registration* Registrations::take(const std::byte* data, size_t bytes, Access access) {
  try {
    return find_or_open(data, bytes, access);
  } catch (const std::bad_alloc&) {
    error_ = status_of_exception();
    return nullptr;
  }
}

Registration* Registrations::find_or_open(const std::byte* data, size_t bytes, Access access) {
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
    ++found.users;
    ++counters_->registration_hits;
    return &found;
  }
  Result<MrHandle> mr = registrar_.open(reinterpret_cast<const void*>(base), bytes,
                                        access_flags(access), loan ? &loan->owner : nullptr);
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

const Registrations::Loan* Registrations::loan_of(const std::byte* data) const {
  for (const Loan& loan : loans_) {
    if (data >= loan.at && data < loan.at + loan.bytes) return &loan;
  }
  return nullptr;
}

// A registration that still has a user ends with its last user, or with the endpoint.
void Registrations::take_back(const std::byte* at) {
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

}  // namespace smddp::ofi
