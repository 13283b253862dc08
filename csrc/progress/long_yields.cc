#include "progress/long_yields.h"

#include <algorithm>
#include <bit>

namespace smddp {

void LongYields::note(uint64_t ended, bool computed) {
  computed_ = ((computed_ << 1) | (computed ? 1 : 0)) & ((1u << kYields) - 1);
  if (!computed || std::popcount(computed_) < 2) return;
  bool again = taken_ns_ > 0 && ended < taken_until_ns_ + kTakenNs;
  taken_ns_ = again ? std::min(2 * taken_ns_, kTakenNs) : kShortestTakenNs;
  taken_until_ns_ = ended + taken_ns_;
}

}  // namespace smddp
