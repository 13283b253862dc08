// Which rail a message or a chunk takes. A message takes the rail with the fewest bytes outstanding, and if there
// are several, the one of them that has been given the fewest bytes. Over TCP the second rule decides nearly
// always, because bytes in a socket's buffer count as sent. Plain turns would not balance the load: if every
// third chunk is followed by a short message, one rail would get two of three chunks. The chunks of one flow take
// turns. Called by libfabric's RailSet, and by the simulator.
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>

#include "transport/wire.h"

namespace smddp {

class RailBalance {
 public:
  // If a rail, being slow, falls further behind than this, it makes up for this much only. Not measured.
  static constexpr uint64_t kRemembered = 1 << 20;
  // A rail with so many more bytes outstanding than another one gets no chunk: simulated (docs/dev/scale.md).
  static constexpr uint64_t kFarBehind = 256 << 10;

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

  // Of a chunk: the rails take turns, so that each flow uses all of them to the same extent, however many bytes for
  // other peers are outstanding. A rail that is slow is left out.
  size_t choose_for_chunk(uint32_t index) const {
    size_t turn = index % rails_, best = choose();
    return outstanding_[turn] > outstanding_[best] + kFarBehind ? best : turn;
  }

  void sent(size_t rail, uint64_t bytes) {
    outstanding_[rail] += bytes;
    ahead_[rail] += bytes;
    uint64_t least = *std::min_element(ahead_.begin(), ahead_.begin() + rails_);
    for (size_t i = 0; i < rails_; ++i) ahead_[i] = std::min(ahead_[i] - least, kRemembered);
  }

  // So many of the bytes that were sent are no longer with libfabric.
  void finished(size_t rail, uint64_t bytes) { outstanding_[rail] -= bytes; }

 private:
  size_t rails_ = 1;
  std::array<uint64_t, wire::kMaxRails> outstanding_ = {};  // bytes with libfabric
  // By rail: bytes given to it, less those given to the rail with the fewest.
  std::array<uint64_t, wire::kMaxRails> ahead_ = {};
};

}  // namespace smddp
