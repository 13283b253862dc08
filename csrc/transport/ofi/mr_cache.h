// Registrations, in one domain, of memory that the endpoint does not own. Knows nothing of regions
// and peers. Called by the classes that send from such memory or receive into it.
//
// When a registration may outlive its use. A cache can't see memory being freed and mapped again at
// the same address. Providers without FI_MR_ALLOCATED (tcp, udp) pin nothing: to them a
// registration is a range of virtual addresses, valid for the memory that is mapped there when data
// arrives, so a kept registration can't go stale. Providers with FI_MR_ALLOCATED (verbs, efa)
// resolve it to physical pages at once: a kept registration would write into pages that may since
// belong to other memory. There it ends with its last user. That costs little, because those
// providers keep the pages pinned in a cache of their own, which watches munmap.
//
// Which users share a registration. A range to send from is widened to whole pages and shared by
// all sends from it at the time. A range that a peer may write into is registered byte for byte, and
// has one user: so its key opens the region that it was granted for and nothing beside it, and ends
// with it. The key is random where the provider leaves the choice to this class.
//
// Lent memory (a device's) stays where it is until it is taken back. It is registered as a whole,
// once to send from and once for all regions in it. So the key of one region opens all of it: its
// owner lends only memory that is meant for such regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <tuple>
#include <vector>

#include "transport/ofi/registrar.h"
#include "transport/ofi/resource.h"
#include "transport/ofi/types.h"

namespace smddp::fabric {

enum class Access : uint8_t { kSend, kReceive, kRead, kRemoteWrite };

struct Registration;
using RegistrationKey = std::tuple<uintptr_t, size_t, Access>;
using RegistrationTable = std::multimap<RegistrationKey, Registration>;

struct Registration {
  MrHandle mr;
  uint64_t key = 0;  // for peers
  uint32_t users = 0;
  RegistrationTable::iterator self;
  bool lent = false;                        // of memory that is lent and not taken back
  std::list<Registration*>::iterator idle;  // valid while users == 0 and not lent

  void* descriptor() const { return ::fi_mr_desc(mr.get()); }
  uintptr_t base() const { return std::get<0>(self->first); }
};

class MrCache {
 public:
  // `bound`: the most registrations that are kept without a user. `counters` gets registrations and
  // hits.
  MrCache(const Registrar& registrar, size_t bound, Counters* counters);

  // nullptr: the provider refused, or there is no memory; error() says why.
  Registration* take(const std::byte* data, size_t bytes, Access access);
  // Throws nothing.
  void give_back(Registration* registration);

  void lend(const std::byte* at, size_t bytes, const MemoryOwner& owner);
  void take_back(const std::byte* at);
  bool is_lent(const std::byte* data) const { return loan_of(data) != nullptr; }

  void clear() {
    idle_.clear();
    table_.clear();
  }

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
  size_t bound_;
  Counters* counters_;
  RegistrationTable table_;
  std::list<Registration*> idle_;  // least recently used first
  std::vector<Loan> loans_;
  Status error_;
};

}  // namespace smddp::fabric
