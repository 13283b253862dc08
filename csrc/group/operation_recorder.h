// Writes the operations of one group into the flight recorder. The group calls it under the engine's lock;
// the torch module has one of its own for operations on a device.
#pragma once

#include <array>
#include <string>

#include "collectives/operation.h"
#include "common/types.h"
#include "recorder/flight_recorder.h"

namespace smddp {

class OperationRecorder {
 public:
  explicit OperationRecorder(const std::string& group_name);

  // `op` is submitted. What starts until end_call() starts at the time of the call.
  void begin(Operation& op);
  // The group's `number`-th operation, of `bytes` bytes. Any thread.
  recorder::Mark begin(Collective collective, Dtype dtype, uint64_t number, uint64_t bytes,
                       uint64_t called_ns) const;
  void end_call() { called_ = nullptr; }
  // The first fragment of `op` starts; its path is known.
  void start(const Operation& op);

 private:
  recorder::FlightRecorder& recorder_;
  const recorder::Text group_;
  std::array<recorder::Text, kCollectives> collectives_{};
  std::array<recorder::Text, kDtypes> dtypes_{};
  // The path of the latest operation: most take the same one.
  std::string path_;
  recorder::Text path_text_ = 0;
  const Operation* called_ = nullptr;
};

}  // namespace smddp
