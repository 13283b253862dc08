// The buffers that a rail receives messages in, and which of them the provider holds. Knows nothing
// of the messages' contents. The rail opens it and counts completions; the endpoint reposts
// buffers.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/ofi/requests.h"
#include "transport/ofi/resource.h"

namespace smddp::ofi {

class ReceiveBuffers {
 public:
  // Cuts `slab` into `count` buffers of `bytes` bytes and posts them to `endpoint`, that of rail
  // `rail`. `mr`: the registration of the slab; none where the provider does not ask for
  // FI_MR_LOCAL. 0, or the error of fi_recv that ends the rail.
  int post_all(fid_ep* endpoint, uint8_t rail, Mapping slab, MrHandle mr, size_t count,
               size_t bytes);

  // Gives a buffer back to the provider. A buffer that it does not take is kept for
  // repost_refused().
  void repost(MessageReceive* receive);
  // Posts the buffers that the provider has refused. 0, or the error of fi_recv that ends the rail.
  int repost_refused();

  void count_completion() { --posted_; }  // of one posted buffer
  bool all_posted() const { return unposted_.empty(); }
  size_t posted() const { return posted_; }
  // Asks the provider for all buffers; each comes back with a completion.
  void cancel_all();

 private:
  // In the order of opening; members are destroyed from the last to the first.
  Mapping slab_;
  std::vector<MessageReceive> receives_;
  MrHandle mr_;

  fid_ep* endpoint_ = nullptr;
  size_t bytes_ = 0;  // of each
  size_t posted_ = 0;
  std::vector<MessageReceive*> unposted_;
  int error_ = 0;
};

}  // namespace smddp::ofi
