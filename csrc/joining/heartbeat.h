// A rank for which ranks of other hosts wait while a group is made counts in the store, by a thread of its own,
// so that those ranks see whether its process lives. Knows not who waits. The exchange of a group begins it.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "common/condition_variable.h"
#include "joining/store.h"

namespace smddp {

inline constexpr std::chrono::milliseconds kHeartbeat{1000};

std::string heartbeat_key(int rank);

class Heartbeat {
 public:
  // `every` of zero: the first count only, and no thread.
  Heartbeat(Store& store, int rank, std::chrono::milliseconds every)
      : store_(store), key_(heartbeat_key(rank)), every_(every) {}
  ~Heartbeat() { end(); }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // The first count is in the store once it returns. Later calls do nothing.
  Status begin();
  // The last count stays in the store: a rank that has seen it there may be about to read it, and would wait
  // for a key that was removed.
  void end();

 private:
  Status count();
  void run();

  Store& store_;
  const std::string key_;
  const std::chrono::milliseconds every_;
  bool began_ = false;
  uint64_t counted_ = 0;  // of the thread, once it runs
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace smddp
