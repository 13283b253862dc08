// What the process has once, whatever the number of groups: the engine and the settings.
#pragma once

#include <mutex>
#include <string>

#include "collectives/selector.h"
#include "progress/engine.h"

namespace smddp {

enum class FallbackMode { kWarn, kSilent, kError };

struct Settings {
  Tuning tuning;
  FallbackMode fallback = FallbackMode::kWarn;
  int max_sms = 9;             // multiprocessors that one sum on a GPU occupies at most
  bool reduce_on_cpu = false;  // none: tensors on a GPU are summed by the CPU
};

// Made on first use; made anew in a forked child. Throws where the host forbids it.
Engine& process_engine();
// Ends the engine's thread, before the interpreter takes the modules away. Idempotent.
void shutdown_process_engine();

// Without a lock: every operation asks.
const Settings& settings();
// What settings() gave before stays valid, with its old values.
void configure(const Settings& settings);

// Called from time to time by threads that wait long, so that Ctrl-C ends a wait. The module sets
// it; it may throw.
extern void (*check_interrupt)();

// Throws the exception type that torch's users expect for `status`, which must not be ok.
[[noreturn]] void throw_status(const Status& status);

}  // namespace smddp
