// What the process has once, whatever the number of groups: the engine with all that groups share, and the settings.
#pragma once

#include <exception>

#include "collectives/selector.h"
#include "progress/process.h"
#include "torch/routes.h"

namespace smddp {

enum class FallbackMode { kWarn, kSilent, kError };

struct Settings {
  Tuning tuning;
  FallbackMode fallback = FallbackMode::kWarn;
  // Multiprocessors that one sum on a GPU occupies at most. 9 read and write 1 TB/s of an H200, 32 three times as much
  // (2026-11-27-gpu-h200).
  int max_sms = 9;
  uint64_t silence_ns = 30'000'000'000ull;  // Group::Options::silence_ns
  RouteTable routes;                        // of groups made from now on
  bool reduce_on_cpu = false;   // the CPU sums tensors on a GPU: no multiprocessor is used
  bool check_first_use = true;  // a first collective on a GPU is compared with its known result
};

// Made on first use, and made anew in a forked child, or once nothing holds it any more: some seconds later its thread
// has ended, and its descriptors are closed.
Result<std::shared_ptr<Process>> this_process();
// nullptr if there is none.
std::shared_ptr<Process> existing_process();
// It stays until the program ends: operations on a device may outlive their group.
void keep_process(std::shared_ptr<Process> process);
// Ends the engine's thread. Must run before the interpreter unloads the modules. Idempotent. `uncaught`: the exception
// that ends the program, for the other ranks; "": none does.
void shut_down_process(const std::string& uncaught);

// Process::refused() since the last reset_refused(); 0 if there is no engine.
uint64_t refused();
void reset_refused();

// Takes no lock, as every operation calls it.
const Settings& settings();
// References that settings() returned before stay valid, with their old values.
void configure(const Settings& settings);

// Threads that wait call it every 200 ms, so that Ctrl-C ends a wait. The module sets it. It may throw.
extern void (*check_interrupt)();
// Runs `function(argument)` without the GIL if this thread holds it. For waits for a thread that may free
// tensors, as freeing them takes the GIL. The module sets it.
extern void (*without_gil)(void (*function)(void*), void* argument);

// Throws the exception type that torch's users expect for `status`, which must not be ok.
[[noreturn]] void throw_status(const Status& status);
std::exception_ptr exception_of(const Status& status);  // the same, not thrown

}  // namespace smddp
