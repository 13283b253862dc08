// Two threads on two cores, for tests of the order in which one sees the other's stores.
#pragma once

#include <sched.h>

namespace smddp {

class TwoCores {
 public:
  TwoCores() {
    sched_getaffinity(0, sizeof before_, &before_);
    for (int core = 0; core < CPU_SETSIZE && count_ < 2; ++core) {
      if (CPU_ISSET(core, &before_)) cores_[count_++] = core;
    }
  }
  ~TwoCores() { sched_setaffinity(0, sizeof before_, &before_); }
  TwoCores(const TwoCores&) = delete;
  TwoCores& operator=(const TwoCores&) = delete;

  // Keeps the calling thread on the first or the second. False: there is none, or that is forbidden.
  bool take(int which) const {
    if (which >= count_) return false;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cores_[which], &one);
    return sched_setaffinity(0, sizeof one, &one) == 0;
  }

 private:
  cpu_set_t before_;
  int cores_[2] = {};
  int count_ = 0;
};

}  // namespace smddp
