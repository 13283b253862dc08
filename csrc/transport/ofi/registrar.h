// Opens registrations of memory in one domain, with a key that can't be guessed where the caller chooses it.
// Called by Registrations, and by Rail for its message buffers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/ofi/resource.h"
#include "transport/ofi/types.h"

namespace smddp::ofi {

class Registrar {
 public:
  Registrar(const Library& library, fid_domain* domain, const fi_info& info);

  // `access`: flags of fi_mr_reg(). `owner`: of a device's memory, else nullptr.
  Result<MrHandle> open(const void* base, size_t bytes, uint64_t access,
                        const MemoryOwner* owner = nullptr) const;

 private:
  Library library_;
  fid_domain* domain_;
  bool provider_keys_;
  uint64_t key_mask_;
};

}  // namespace smddp::ofi
