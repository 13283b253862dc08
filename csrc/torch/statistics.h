// What the process's groups have done: calls, bytes and seconds by collective and path. The
// fallback ledger is the part of it whose path starts with "fallback:".
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace smddp {

struct StatisticsRow {
  uint64_t calls = 0;
  uint64_t bytes = 0;   // of all ranks' blocks: an AllGather's output, a ReduceScatter's input
  uint64_t rounds = 0;  // an operation larger than its bucket takes several
  uint64_t largest_round = 0;  // bytes
  double seconds = 0;          // from call to completion
  double wait_seconds = 0;     // of that, callers blocked
};

class Statistics {
 public:
  using Rows = std::map<std::pair<std::string, std::string>, StatisticsRow>;

  static Statistics& process();
  template <class F>
  void update(const std::string& collective, const std::string& path, F&& change) {
    std::lock_guard lock(mutex_);
    change(rows_[{collective, path}]);
  }
  Rows rows() const;
  void reset();

 private:
  mutable std::mutex mutex_;
  Rows rows_;
};

}  // namespace smddp
