#include "transport/ofi/registrar.h"

#include <sys/uio.h>

#include <string>

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

}  // namespace smddp::ofi
