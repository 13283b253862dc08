// Messages of groups that this rank does not have: of a group that it is still making, as a peer
// may be ahead by one bootstrap, of a group that it has left, or of a foreign process. The first
// kind is handed out once the group is there. Knows headers, not what a group is. Called by Groups,
// under the engine's lock.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "transport/wire.h"

namespace smddp {

class EarlyMessages {
 public:
  struct Message {
    wire::Header header;
    std::vector<std::byte> payload;
  };

  // Bytes of messages that are kept, of all groups: what 4,095 peers announce of eight fragments each.
  static constexpr size_t kMostBytes = 8 << 20;

  // Keeps a message for which wire::check() is true. If there are too many, the oldest are dropped.
  void keep(const wire::Header& header, const std::byte* payload) noexcept;
  // Those of `key`, in the order in which they came; they are no longer here.
  std::vector<Message> take(const JobKey& key);
  void drop_all() noexcept {
    dropped_ += messages_.size();
    messages_.clear();
    bytes_ = 0;
    lost_.fill({});
  }
  // True if a message of `key` was lost because there was no memory for it.
  bool has_lost(const JobKey& key) const {
    return std::find(lost_.begin(), lost_.end(), key) != lost_.end();
  }
  uint64_t dropped() const { return dropped_; }  // messages, because they were too many or too long

 private:
  static size_t bytes_of(const Message& message) {
    return sizeof message.header + message.payload.size();
  }

  std::deque<Message> messages_;
  size_t bytes_ = 0;  // of messages_
  uint64_t dropped_ = 0;
  std::array<JobKey, 16> lost_{};  // the latest
  size_t next_lost_ = 0;
};

}  // namespace smddp
