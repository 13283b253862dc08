#include "torch/runtime.h"

#include <c10/util/Exception.h>

namespace smddp {
namespace {

std::mutex mutex;
Engine* engine = nullptr;  // never freed: a thread may still be on its way out of it at exit
Settings current;

}  // namespace

void (*check_interrupt)() = [] {};

Engine& process_engine() {
  std::lock_guard lock(mutex);
  if (engine == nullptr || engine->forked()) {
    auto created = Engine::create();
    if (!created) throw_status(created.status());
    engine = created.value().release();
  }
  return *engine;
}

void shutdown_process_engine() {
  std::lock_guard lock(mutex);
  if (engine != nullptr && !engine->forked()) engine->shutdown();
}

Settings settings() {
  std::lock_guard lock(mutex);
  return current;
}

void configure(const Settings& settings) {
  std::lock_guard lock(mutex);
  current = settings;
}

void throw_status(const Status& status) {
  std::string message = "smddp: " + status.message();
  switch (status.code()) {
    case Code::kInvalid:
      C10_THROW_ERROR(ValueError, message);
    case Code::kUnavailable:
    case Code::kMismatch:
    case Code::kTimeout:
    case Code::kPeerLost:
    case Code::kAborted:
      C10_THROW_ERROR(DistBackendError, message);
    default:
      C10_THROW_ERROR(Error, message);
  }
}

}  // namespace smddp
