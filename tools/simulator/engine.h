// The engines of a simulation: thousands in one process, without threads. The simulator makes them and drives
// each when its time has come.
#pragma once

#include <cstdint>
#include <memory>

#include "progress/process.h"

namespace smddp {

class SimulatedEngine {
 public:
  // A process whose engine has no thread of its own, and whose transport `open` opens. Engine::wait() is
  // not for it.
  static Result<std::unique_ptr<Process>> create(transport::Open open);
  // One pass, and with `watches` a look for late ranks, as before a sleep; then what is complete. True if
  // anything moved.
  static bool turn(Engine& engine, bool watches);
  // From now on groups end without a word to their peers, for which time would have to pass.
  static void end(Engine& engine) { engine.stop_ = true; }
  static uint32_t passes(const Engine& engine) { return engine.passes_; }
};

}  // namespace smddp
