// Registrations, in one domain, of memory that the endpoint does not own. Knows nothing of regions
// and peers. Called by the classes that send from such memory or receive into it.
//
// A registration ends with its last user: none that is kept could see that memory is freed and mapped again at the
// same address, and would then go stale. That costs little: tcp asks for no registration of what is sent, and
// efa and verbs keep the pages pinned in caches of their own, which watch munmap.
//
// A range to send from is widened to whole pages and shared by all sends from it at the time. A range that a peer
// may write into is registered byte for byte, and has one user: so its key opens the region that it was granted for
// and nothing beside it, and ends with it. The key is random where the provider leaves the choice to the caller.
//
// Lent memory (a device's) stays where it is until it is taken back. It is registered as a whole,
// once to send from and once for all regions in it. So the key of one region opens all of it: its
// owner lends only memory that is meant for such regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "transport/ofi/resource.h"
#include "transport/ofi/types.h"

namespace smddp::ofi {

enum class Access : uint8_t { kSend, kRead, kRemoteWrite };

// Opens registrations of memory in one domain, with a key that can't be guessed where the caller chooses it.
// Called by Registrations, and by Rail for its message buffers.
class Registrar {
 public:
  Registrar(const Library& library, fid_domain* domain, const fi_info& info);

  // `access`: flags of fi_mr_reg(). `owner`: of a device's memory, else nullptr.
  Result<MrHandle> open(const void* base, size_t bytes, uint64_t access,
                        const MemoryOwner* owner = nullptr) const;
  // The same with a key that open() has chosen before. nullptr if the provider chooses keys, or refuses.
  MrHandle open_again(uint64_t key, const void* base, size_t bytes, uint64_t access) const;

 private:
  Library library_;
  fid_domain* domain_;
  bool provider_keys_;
  uint64_t key_mask_;
};

struct Registration;
using RegistrationKey = std::tuple<uintptr_t, size_t, Access>;
using RegistrationTable = std::multimap<RegistrationKey, Registration>;

struct Registration {
  MrHandle mr;
  uint64_t key = 0;  // for peers
  uint32_t users = 0;
  RegistrationTable::iterator self;
  bool lent = false;  // of memory that is lent and not taken back

  void* descriptor() const { return ::fi_mr_desc(mr.get()); }
  uintptr_t base() const { return std::get<0>(self->first); }
};

class Registrations {
 public:
  // `counters` gets registrations and hits.
  Registrations(const Registrar& registrar, Counters* counters)
      : registrar_(registrar), counters_(counters) {}

  // nullptr: the provider refused, or there is no memory; error() says why.
  Registration* take(const std::byte* data, size_t bytes, Access access);
  // Throws nothing.
  void give_back(Registration* registration) {
    if (--registration->users == 0 && !registration->lent) table_.erase(registration->self);
  }

  // The key of a range that a peer writes into opens [to, to + bytes) from now on. False: it opens nothing.
  bool divert(Registration* registration, const std::byte* to, size_t bytes);

  void lend(const std::byte* at, size_t bytes, const MemoryOwner& owner) {
    loans_.push_back({at, bytes, owner});
  }
  void take_back(const std::byte* at);
  bool is_lent(const std::byte* data) const { return loan_of(data) != nullptr; }

  const Status& error() const { return error_; }

 private:
  struct Loan {
    const std::byte* at;
    size_t bytes;
    MemoryOwner owner;
  };

  const Loan* loan_of(const std::byte* data) const;
  Registration* find_or_open(const std::byte* data, size_t bytes, Access access);

  const Registrar registrar_;
  Counters* counters_;
  RegistrationTable table_;
  std::vector<Loan> loans_;
  Status error_;
};

}  // namespace smddp::ofi
