// The order in which the groups of a process submit operations to one device. It must be the same on all ranks: a
// thread that submits to a full stream blocks all others that call the device, until the peers submit the same
// operation, and what shares a stream or a hardware queue waits for what was submitted before. If a peer's
// device was held up by an operation that this rank submits later, both would wait for ever. One per device;
// DeviceGroup takes turns.
//
// It is the order of the calls, which is the same on all ranks if their calls are; an operation that a rank has not
// called then holds up those of other groups. Where all groups have their ranks on one host, it is that of the last
// calls: what some rank has yet to call comes after all that every rank has called, and holds up nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include "common/condition_variable.h"

namespace smddp::device {

class SubmissionOrder {
 public:
  void set_by_last_call(bool by_last_call);

  // Whether all other ranks have called the operation; if not, they take the times of their calls after this
  // question.
  using Called = std::function<bool()>;
  // The turn of an operation that is called now, before the time of the call is taken. `group`: a number that differs
  // between groups and is the same on all ranks.
  uint64_t enter(uint64_t group, Called called);
  // All ranks have called it, the last one at that time of the host's clock.
  void set_last_call(uint64_t turn, uint64_t ns);
  // Waits until every earlier turn is over. Earlier operations that cannot start within about a second, as a
  // rank has not called them, lose their place, with one warning per process: another order is better than
  // none.
  void begin(uint64_t turn);
  // The operation is submitted, or will never be.
  void end(uint64_t turn);

 private:
  struct Turn {
    uint64_t group;
    Called called;
    uint64_t last_call_ns = 0;  // 0: not known
    bool begun = false, passed = false;
  };
  using Turns = std::map<uint64_t, Turn>;  // not over
  bool comes_before(const Turns::value_type& other, const Turns::value_type& mine) const;

  std::mutex mutex_;
  std::condition_variable changed_;
  Turns turns_;
  uint64_t last_ = 0;
  bool by_last_call_ = false;
};

}  // namespace smddp::device
