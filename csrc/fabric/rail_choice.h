// Which rail a message or a chunk takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace smddp::fabric {

// The rail with the fewest bytes outstanding. Among equals the first at or after `turn`, which the
// caller advances, so that small messages do not all take the same one. A pure function.
inline size_t choose_rail(std::span<const uint64_t> outstanding, size_t turn) {
  size_t rails = outstanding.size();
  size_t best = turn % rails;
  for (size_t step = 1; step < rails; ++step) {
    size_t rail = (turn + step) % rails;
    if (outstanding[rail] < outstanding[best]) best = rail;
  }
  return best;
}

}  // namespace smddp::fabric
