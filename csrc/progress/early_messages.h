// Messages of groups that this rank does not have: of a group that it is still making, as a peer may be
// ahead by one bootstrap, of a group that it has left, or of a stranger. The first kind is handed out once
// the group is there. Knows headers, not what a group is. Called by Engine, under its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "fabric/wire.h"

namespace smddp {

class EarlyMessages {
 public:
  struct Message {
    wire::Header header;
    std::vector<std::byte> payload;
  };

  // Keeps a message of which wire::check() holds. If there are too many, the oldest is dropped.
  void keep(const wire::Header& header, const std::byte* payload);
  // Those of `key`, in the order in which they came; they are no longer here.
  std::vector<Message> take(const JobKey& key);
  // A message that no group can want is dropped.
  void count_dropped() { ++dropped_; }
  uint64_t dropped() const { return dropped_; }

 private:
  static constexpr size_t kMost = 4096;

  std::deque<Message> messages_;
  uint64_t dropped_ = 0;
};

}  // namespace smddp
