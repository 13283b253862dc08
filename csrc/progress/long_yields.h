// What the yields of a thread say about the cores: whether other threads compute there. Decides from times alone.
// Called by WaitPolicy.
#pragma once

#include <cstdint>

namespace smddp {

// Among threads that only poll, one yield of some thousand takes long; beside a thread that computes, most do.
// So two of the last kYields count, for kShortestTakenNs, and for twice the last time, up to kTakenNs, if they
// come within kTakenNs after its end. What computes for a moment, as a process does that starts, is forgotten soon.
class LongYields {
 public:
  // A yield ended. `computed`: it took so long that another thread has computed.
  void note(uint64_t ended, bool computed);
  // Other threads compute on the cores.
  bool show_computing(uint64_t now) const { return now < taken_until_ns_; }
  bool have_shown_computing() const { return taken_until_ns_ != 0; }

 private:
  static constexpr int kYields = 8;
  static constexpr uint64_t kShortestTakenNs = 50'000'000;
  static constexpr uint64_t kTakenNs = 3'000'000'000;

  uint32_t computed_ = 0;        // a bit for each of the last ones, the latest in the lowest
  uint64_t taken_until_ns_ = 0;  // the cores are taken until then
  uint64_t taken_ns_ = 0;        // for so long after the last yields that showed it
};

}  // namespace smddp
