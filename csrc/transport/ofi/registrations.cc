#include "transport/ofi/registrations.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "common/exceptions.h"

namespace smddp::ofi {
namespace {

uint64_t access_flags(Access access) {
  switch (access) {
    case Access::kSend:
      return FI_SEND | FI_WRITE;
    case Access::kRead:
      return FI_READ;
    case Access::kRemoteWrite:
      return FI_REMOTE_WRITE;
  }
  return 0;
}

}  // namespace

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
