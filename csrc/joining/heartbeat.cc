#include "joining/heartbeat.h"

#include <utility>

#include "joining/encoding.h"

namespace smddp {

std::string heartbeat_key(int rank) { return key_of("heartbeat", rank); }

Status Heartbeat::begin() {
  if (std::exchange(began_, true)) return {};
  if (Status out = count(); !out) return out;
  if (every_.count() > 0) thread_ = std::thread([this] { run(); });
  return {};
}

void Heartbeat::end() {
  if (!began_) return;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  began_ = false;
}

Status Heartbeat::count() {
  Encoder w;
  w(++counted_);
  return store_.set(key_, w.out);
}

// If the store fails, the rank notices it by itself.
void Heartbeat::run() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, every_, [this] { return ended_; })) {
    try {
      (void)count();
    } catch (...) {  // without memory it counts again a moment later
    }
  }
}

}  // namespace smddp
