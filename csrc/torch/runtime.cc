#include "torch/runtime.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace smddp {
namespace {

std::mutex mutex;
Process* process = nullptr;  // never freed: at exit a thread may still be inside it
uint64_t refused_before = 0;
// Never freed: readers hold no lock. A process is configured a few times at most.
std::atomic<const Settings*> current{new Settings()};

}  // namespace

void (*check_interrupt)() = [] {};

Result<Process*> this_process() {
  std::lock_guard lock(mutex);
  if (process == nullptr || process->engine().forked()) {
    auto created = Process::create();
    if (!created) return created.status();
    process = created.value().release();
  }
  return process;
}

void shut_down_process() {
  std::lock_guard lock(mutex);
  if (process != nullptr && !process->engine().forked()) process->engine().shutdown();
}

uint64_t refused() {
  std::lock_guard lock(mutex);
  return process != nullptr && !process->engine().forked() ? process->refused() - refused_before
                                                           : 0;
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
