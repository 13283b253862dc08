// How much of a fragment's flows is with the NICs at once, where a chunk's completion says that it has arrived: what
// this rank has to say of earlier chunks would queue behind more. Must not know when a flow may send.
// FragmentFlows asks it before each chunk.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flows/flow.h"

namespace smddp {

class SendWindow {
 public:
  SendWindow() = default;  // without a bound
  // `bytes`: send_window_bytes() of collectives/selector.h.
  explicit SendWindow(size_t bytes) : bytes_(bytes) {}

  // Whether what `send` sends next is a chunk that has to wait. Flows that keep step start one after
  // another: of `sends`, those before `first` are done, and those of later steps have no chunks with the NICs.
  bool full(const FlowList<SendFlow>& sends, size_t first, const SendFlow& send) const {
    if (bytes_ == SIZE_MAX || !send.in_chunks()) return false;
    size_t chunks = 1;
    for (size_t i = first; i < sends.size() && sends[i].step <= send.step; ++i)
      chunks += sends[i].chunks.count();
    return chunks * send.grant.chunk_bytes > bytes_;
  }

 private:
  size_t bytes_ = SIZE_MAX;
};

}  // namespace smddp
