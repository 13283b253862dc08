// Counters of the process's groups: calls, bytes and seconds by collective and path. The fallback ledger is
// the rows whose path starts with "fallback:".
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "collectives/operation.h"

namespace smddp {

struct StatisticsRow {
  uint64_t calls = 0;
  uint64_t bytes = 0;      // of all ranks' blocks: an AllGather's output, a ReduceScatter's input
  uint64_t fragments = 0;  // an operation larger than its bucket takes several
  uint64_t largest_fragment = 0;  // bytes
  Taken taken;                    // from the host's other ranks
  SentBytes sent;                 // to other hosts
  double seconds = 0;             // from call to completion, or until the waiting caller went on
  double wait_seconds = 0;        // of that, time in which callers were blocked
};

class Statistics {
 public:
  using Key = std::pair<std::string, std::string>;
  using View = std::pair<std::string_view, std::string_view>;
  struct Before {
    using is_transparent = void;
    bool operator()(const View& a, const View& b) const { return a < b; }
  };
  using Rows = std::map<Key, StatisticsRow, Before>;

  static Statistics& process() {
    static auto* statistics =
        new Statistics();  // never freed, as threads may count until the process ends
    return *statistics;
  }
  // Allocates only when it makes a row.
  template <class F>
  void update(std::string_view collective, std::string_view path, F&& change) {
    std::lock_guard lock(mutex_);
    auto row = rows_.find(View(collective, path));
    if (row == rows_.end()) row = rows_.try_emplace(Key(collective, path)).first;
    change(row->second);
  }
  Rows rows() const {
    std::lock_guard lock(mutex_);
    return rows_;
  }
  void reset() { restore({}); }
  void restore(Rows rows) {
    std::lock_guard lock(mutex_);
    rows_ = std::move(rows);
  }

 private:
  mutable std::mutex mutex_;
  Rows rows_;
};

}  // namespace smddp
