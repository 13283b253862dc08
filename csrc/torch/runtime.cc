#include "torch/runtime.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace smddp {
namespace {

// A rank that waits asks once a second.
constexpr std::chrono::seconds kLastAnswers(4);

// Of processes of the core, one after the other. Never freed: at exit a thread may still use it.
struct Shared {
  std::mutex mutex;
  std::weak_ptr<Process> current;
  std::shared_ptr<Process> kept;
  Process* ending = nullptr;  // of end_soon()
  uint64_t endings = 0;  // so many have begun: an earlier one does not end the same process sooner
  Network::Known known;  // to the last one that has ended
  uint64_t refused = 0;  // by those that have ended
  uint64_t not_refused = 0;  // of all, before the last reset
};

Shared& shared() {
  static auto* state = new Shared();
  return *state;
}

// Under the mutex.
std::shared_ptr<Process> of_this_fork() {
  auto process = shared().current.lock();
  return process && process->engine().forked() ? nullptr : process;
}

// It still answers for a moment: ranks that wait for it hear that it has left their groups, and why.
void end_soon(void* released) {
  auto* process = static_cast<Process*>(released);
  uint64_t refused = process->refused();
  Engine::Lock engine = process->engine().lock();
  Network::Known known = process->network().known();
  engine.unlock();
  std::lock_guard lock(shared().mutex);
  shared().refused += refused;
  shared().known = std::move(known);
  Process* before = std::exchange(shared().ending, process);
  std::thread([process, before, ending = ++shared().endings] {
    delete before;
    std::this_thread::sleep_for(kLastAnswers);
    {
      std::lock_guard lock(shared().mutex);
      if (shared().ending != process || shared().endings != ending) return;  // in use again
      shared().ending = nullptr;
    }
    delete process;
  }).detach();
}

void release(Process* process) {
  // In a forked child its thread and its connections are the parent's.
  if (!process->engine().forked()) without_gil(end_soon, process);
}

// Never freed: readers hold no lock. A process is configured a few times at most.
std::atomic<const Settings*> current{new Settings()};

}  // namespace

void (*check_interrupt)() = [] {};

std::shared_ptr<Process> existing_process() {
  std::lock_guard lock(shared().mutex);
  return of_this_fork();
}

Result<std::shared_ptr<Process>> this_process() {
  std::lock_guard lock(shared().mutex);
  if (auto process = of_this_fork()) return process;
  Process* found = std::exchange(shared().ending, nullptr);
  if (found == nullptr || found->engine().forked()) {
    auto created = Process::create();
    if (!created) return created.status();
    found = created.value().release();
    Engine::Lock engine = found->engine().lock();
    found->network().remember(shared().known);
  } else {
    shared().refused -= found->refused();
  }
  std::shared_ptr<Process> process(found, release);
  shared().current = process;
  return process;
}

void keep_process(std::shared_ptr<Process> process) {
  std::lock_guard lock(shared().mutex);
  shared().kept.swap(process);
}

void shut_down_process(const std::string& uncaught) {
  if (auto process = existing_process()) {
    if (!uncaught.empty()) {
      Engine::Lock lock = process->engine().lock();
      process->broke(uncaught);
    }
    process->engine().shutdown();
  }
  std::lock_guard lock(shared().mutex);
  if (shared().ending != nullptr) shared().ending->engine().shutdown();
}

uint64_t refused() {
  auto process = existing_process();
  uint64_t now = process ? process->refused() : 0;
  std::lock_guard lock(shared().mutex);
  return shared().refused + now - shared().not_refused;
}

void reset_refused() {
  uint64_t now = refused();
  std::lock_guard lock(shared().mutex);
  shared().not_refused += now;
}

const Settings& settings() { return *current.load(std::memory_order_acquire); }

void configure(const Settings& settings) {
  current.store(new Settings(settings), std::memory_order_release);
}

void throw_status(const Status& status) {
  std::string message = "smddp: " + status.message();
  if (status.code() == Code::kInvalid) C10_THROW_ERROR(ValueError, message);
  if (status.code() == Code::kInternal) C10_THROW_ERROR(Error, message);
  C10_THROW_ERROR(DistBackendError, message);
}

std::exception_ptr exception_of(const Status& status) {
  try {
    throw_status(status);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace smddp
