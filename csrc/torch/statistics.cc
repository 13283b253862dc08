#include "torch/statistics.h"

namespace smddp {

Statistics& Statistics::process() {
  static auto* statistics =
      new Statistics();  // never freed, as threads may count until the process ends
  return *statistics;
}

Statistics::Rows Statistics::rows() const {
  std::lock_guard lock(mutex_);
  return rows_;
}

void Statistics::reset() {
  std::lock_guard lock(mutex_);
  rows_.clear();
}

void Statistics::restore(Rows rows) {
  std::lock_guard lock(mutex_);
  rows_ = std::move(rows);
}

}  // namespace smddp
