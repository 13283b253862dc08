#include "simulator/engine.h"

#include <utility>

#include "common/clock.h"

namespace smddp {

Result<std::unique_ptr<Process>> SimulatedEngine::create(transport::Open open) {
  auto presence = intranode::Presence::create();
  if (!presence) return presence.status();
  std::unique_ptr<Process> process(new Process(std::move(presence.value()), std::move(open)));
  return process;
}

bool SimulatedEngine::turn(Engine& engine, bool watches) {
  Engine::Lock lock = engine.lock();
  bool moved = engine.pass() || !engine.complete_.empty();
  if (watches) moved |= engine.groups_.watch(now_ns());
  engine.run_complete(lock);
  return moved;
}

}  // namespace smddp
