// The rates at which large flows from other hosts come, beside what the network is taken for. Reads no clock.
// FragmentFlows counts, the group asks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace smddp {

class ObservedRates {
 public:
  enum class Verdict : uint8_t { kNone, kTooLow, kTooHigh };

  // Bytes of a flow that travelled, and the time that they took. Of an operation in which a rank receives from one rank at
  // a time.
  void count(uint64_t bytes, uint64_t ns) {
    if (bytes < kLeastBytes || ns < kLeastNs) return;
    fastest_ = std::max(fastest_, static_cast<double>(bytes) / static_cast<double>(ns));
    ++flows_;
  }
  // Whether the network of a host with `ranks` ranks can't be what it is taken for, in bytes per nanosecond, by the last
  // flows: kNone until there are enough. One flow has at most what the host has, and if all ranks receive, its share; of
  // that again a part if operations overlap.
  Verdict judge(double bytes_per_ns, double ranks) {
    if (fastest_ > kFaster * bytes_per_ns) return Verdict::kTooLow;
    if (flows_ < kFlows) return Verdict::kNone;
    bool slow = kSlower * fastest_ * ranks < bytes_per_ns;
    flows_ = 0;
    fastest_ = 0;
    return slow ? Verdict::kTooHigh : Verdict::kNone;
  }
  // Of the flows since the last answer; 0: there is none.
  double fastest() const { return fastest_; }

 private:
  // A burst that a switch or a shaper lets pass has tens of KiB. Of the slow flows all but one in so many may have
  // waited for a core, or for their sender.
  static constexpr uint64_t kLeastBytes = 1 << 20, kLeastNs = 2'000'000;
  static constexpr int kFlows = 16;
  // Not measured: the less, the sooner a model that holds is measured again.
  static constexpr double kFaster = 2, kSlower = 4;

  double fastest_ = 0;
  int flows_ = 0;
};

}  // namespace smddp
