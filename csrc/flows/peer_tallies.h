// What one rank of a group learns of the others while nothing fails: how long its callers waited for each of
// them to start, and how fast the bytes of each arrived. Only clocks of this host are compared. Plain counters
// under the engine's lock; fragments and their flows count, the group reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/small_vector.h"
#include "common/types.h"
#include "flows/observed_rates.h"

namespace smddp {

struct PeerTally {
  // Time in which callers waited for this rank's start after half of the ranks had started, and in how many
  // operations.
  uint64_t late_ns = 0;
  uint64_t late = 0;
  // Of its large flows to this rank: bytes behind the first ones that were seen, the time that they took, and
  // the part of it in which a caller waited.
  uint64_t flow_bytes = 0;
  uint64_t flow_ns = 0;
  uint64_t flow_waited_ns = 0;
};

// By rank.
class PeerTallies {
 public:
  explicit PeerTallies(int ranks) : tallies_(static_cast<size_t>(ranks)) {}
  PeerTally& of(Rank rank) { return tallies_[static_cast<size_t>(rank)]; }
  const std::vector<PeerTally>& all() const { return tallies_; }
  // A large flow has come: the bytes of it that travelled, from when to when. `waited_from`: since when a caller has
  // waited; 0: none has. `alone`: no other one comes at once, but of other operations.
  void count_flow(Rank rank, uint64_t bytes, uint64_t from, uint64_t now, uint64_t waited_from,
                  bool alone) {
    PeerTally& tally = of(rank);
    tally.flow_bytes += bytes;
    tally.flow_ns += now - from;
    if (waited_from != 0) tally.flow_waited_ns += now - std::min(now, std::max(from, waited_from));
    if (alone) rates_.count(bytes, now - from);
  }
  ObservedRates& rates() { return rates_; }

 private:
  std::vector<PeerTally> tallies_;
  ObservedRates rates_;
};

// When this rank saw that each of the others had started an operation, after it had started itself. Reads no
// clock: `now` is the time of the look that found the start, or 0 if the start came before this rank's own.
class Starts {
 public:
  // Once, before any other call.
  void begin(int ranks) { at_.assign(static_cast<size_t>(ranks), kNotAwaited); }
  // Before any start is seen.
  void await(Rank rank) {
    uint64_t& at = at_[static_cast<size_t>(rank)];
    if (at == kUnseen) return;
    at = kUnseen;
    ++awaited_;
    ++unseen_;
  }
  bool any_unseen() const { return unseen_ > 0; }
  bool is_unseen(Rank rank) const {
    return unseen_ > 0 && at_[static_cast<size_t>(rank)] == kUnseen;
  }
  // Of a rank that is unseen. `own`: it alone decided when; else its start may have waited for another rank.
  void seen(Rank rank, uint64_t now, bool own = true) {
    at_[static_cast<size_t>(rank)] = own ? now : 0;
    --unseen_;
    if (own) last_ = std::max(last_, now);
    // This rank is one of those that have started: before this start they were fewer than half.
    if (2 * (awaited_ - unseen_) < awaited_ + 1) half_ = now;
  }
  // `waited_from`: since when a caller waits; 0: none does.
  void count(PeerTallies& tallies, uint64_t waited_from) const {
    uint64_t from = std::max(half_, waited_from);
    if (waited_from == 0 || last_ <= from) return;
    for (size_t rank = 0; rank < at_.size(); ++rank) {
      uint64_t at = at_[rank];
      if (at >= kUnseen || at <= from) continue;
      PeerTally& tally = tallies.of(static_cast<Rank>(rank));
      tally.late_ns += at - from;
      ++tally.late;
    }
  }

 private:
  static constexpr uint64_t kUnseen = UINT64_MAX - 1, kNotAwaited = UINT64_MAX;

  SmallVector<uint64_t, 16> at_;  // by rank
  uint32_t awaited_ = 0, unseen_ = 0;
  uint64_t half_ = 0;  // when half of the ranks had started
  uint64_t last_ = 0;
};

}  // namespace smddp
