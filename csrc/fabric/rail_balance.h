// Which rail a message or a chunk takes: the one with the fewest bytes outstanding, and of several the
// one that has been given the fewest bytes. Over TCP that decides nearly always, as what waits in a
// socket's buffer counts as sent. Taking turns would not do: where every third chunk is followed by a
// short message, one rail would get two of three chunks.
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>

#include "fabric/wire.h"

namespace smddp::fabric {

class RailBalance {
 public:
  // A rail that falls behind further than this, being slow, does not make up for more of it.
  static constexpr uint64_t kRemembered = 1 << 20;

  void set_rails(size_t rails) {
    assert(rails > 0 && rails <= wire::kMaxRails);
    rails_ = rails;
  }

  size_t choose() const {
    size_t best = 0;
    for (size_t rail = 1; rail < rails_; ++rail) {
      if (outstanding_[rail] < outstanding_[best] ||
          (outstanding_[rail] == outstanding_[best] && ahead_[rail] < ahead_[best]))
        best = rail;
    }
    return best;
  }

  void sent(size_t rail, uint64_t bytes) {
    outstanding_[rail] += bytes;
    ahead_[rail] += bytes;
    uint64_t least = *std::min_element(ahead_.begin(), ahead_.begin() + rails_);
    for (size_t i = 0; i < rails_; ++i) ahead_[i] = std::min(ahead_[i] - least, kRemembered);
  }

  // What was sent is no longer with libfabric.
  void finished(size_t rail, uint64_t bytes) { outstanding_[rail] -= bytes; }

 private:
  size_t rails_ = 1;
  std::array<uint64_t, wire::kMaxRails> outstanding_ = {};  // bytes with libfabric
  std::array<uint64_t, wire::kMaxRails> ahead_ = {};  // bytes more than the rail given the fewest
};

}  // namespace smddp::fabric
