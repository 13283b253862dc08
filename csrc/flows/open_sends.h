// The send flows of a fragment that have bytes to send, or to tell their targets of: a pass looks at no others, so
// that its work does not grow with the peers that are done. Must not know when a flow may send. FragmentFlows
// asks it once per pass.
#pragma once

#include <cstddef>
#include <vector>

#include "flows/flow.h"

namespace smddp {

class OpenSends {
 public:
  // `sends` keep their addresses.
  void make(FlowList<SendFlow>& sends) {
    flows_.reserve(sends.size());
    for (SendFlow& send : sends) flows_.push_back(&send);
  }
  // f(send) for each that belongs to step `last` or an earlier one, in their order.
  template <class F>
  void for_each(int last, F&& f) {
    size_t kept = 0, i = 0;
    for (; i < flows_.size() && flows_[i]->step <= last; ++i) {
      SendFlow& send = *flows_[i];
      f(send);
      if (!send.told_all()) flows_[kept++] = &send;
    }
    auto at = flows_.begin();
    flows_.erase(at + static_cast<ptrdiff_t>(kept), at + static_cast<ptrdiff_t>(i));
  }

 private:
  std::vector<SendFlow*> flows_;
};

}  // namespace smddp
