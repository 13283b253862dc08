#include "progress/simulated_engine.h"

#include <utility>

#include "common/clock.h"

namespace smddp {

Result<std::unique_ptr<Engine>> SimulatedEngine::create(const fabric::Options& fabric) {
  auto presence = intranode::Presence::create();
  if (!presence) return presence.status();
  std::unique_ptr<Engine> engine(new Engine());
  engine->presence_ = std::move(presence.value());
  engine->network_.simulate(fabric);
  return engine;
}

bool SimulatedEngine::turn(Engine& engine, bool watches) {
  Engine::Lock lock = engine.lock();
  bool moved = engine.pass() || !engine.finished_.empty();
  if (watches) moved |= engine.groups_.watch(now_ns());
  engine.run_finished(lock);
  return moved;
}

}  // namespace smddp
