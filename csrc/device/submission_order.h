// The order in which the groups of a process submit operations to one device: that of the calls, so that it
// is the same on all ranks if their calls are. A thread that submits to a full stream blocks all others that
// call the device, until the peers submit the same operation. If a peer's device was blocked by an operation
// that this rank submits later, both would wait for ever. One per device; DeviceGroup takes turns.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "common/condition_variable.h"

namespace smddp::device {

class SubmissionOrder {
 public:
  // The turn of an operation that is called now.
  uint64_t enter();
  // Waits until every earlier turn is over. Earlier operations that cannot start within about a second, as a
  // rank has not called them, lose their place, with one warning per process: another order is better than
  // none.
  void begin(uint64_t turn);
  // The operation is submitted, or will never be.
  void end(uint64_t turn);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, bool> turns_;  // not over; whether it has begun
  uint64_t last_ = 0;
};

}  // namespace smddp::device
