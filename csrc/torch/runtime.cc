#include "torch/runtime.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace smddp {
namespace {

std::mutex mutex;
Engine* engine = nullptr;  // never freed: at exit a thread may still be inside it
uint64_t refused_before = 0;
// Never freed: readers hold no lock. A process is configured a few times at most.
std::atomic<const Settings*> current{new Settings()};

}  // namespace

void (*check_interrupt)() = [] {};

Result<Engine*> process_engine() {
  std::lock_guard lock(mutex);
  if (engine == nullptr || engine->forked()) {
    auto created = Engine::create();
    if (!created) return created.status();
    engine = created.value().release();
  }
  return engine;
}

void shutdown_process_engine() {
  std::lock_guard lock(mutex);
  if (engine != nullptr && !engine->forked()) engine->shutdown();
}

uint64_t refused() {
  std::lock_guard lock(mutex);
  return engine != nullptr && !engine->forked() ? engine->refused() - refused_before : 0;
}

void reset_refused() {
  uint64_t now = refused();
  std::lock_guard lock(mutex);
  refused_before += now;
}

const Settings& settings() { return *current.load(std::memory_order_acquire); }

void configure(const Settings& settings) {
  current.store(new Settings(settings), std::memory_order_release);
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
