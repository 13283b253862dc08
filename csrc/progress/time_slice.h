// What a thread asks of Linux's scheduler. Called by the engine's background thread.
#pragma once

namespace smddp {

// The shortest time slice that Linux grants, for the calling thread: with it, the thread gets a
// core at once from a thread that computes, and not at the scheduler's next tick. A thread that
// already has another policy or priority stays as it is.
void request_short_time_slices();
// Sleeps of the calling thread end when their time is over, and not up to 50 us later.
void request_exact_timers();

}  // namespace smddp
