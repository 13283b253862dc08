#include "flows/flow.h"

namespace smddp {

bool Coverage::add(uint64_t offset, uint64_t bytes) {
  if (offset > bytes_ || bytes > bytes_ - offset) return false;
  if (bytes == 0) return true;
  size_t end = offset + bytes;
  if (offset < prefix_) return false;
  auto next = std::lower_bound(ahead_.begin(), ahead_.end(), std::pair(size_t{offset}, size_t{0}));
  if (next != ahead_.end() && next->first < end) return false;
  if (next != ahead_.begin() && std::prev(next)->second > offset) return false;
  total_ += bytes;
  if (offset == prefix_) {
    prefix_ = end;
    auto reached = ahead_.begin();
    for (; reached != ahead_.end() && reached->first == prefix_; ++reached)
      prefix_ = reached->second;
    ahead_.erase(ahead_.begin(), reached);
    return true;
  }
  if (next != ahead_.end() && next->first == end) {
    next->first = offset;
    if (next != ahead_.begin() && std::prev(next)->second == offset) {
      std::prev(next)->second = next->second;
      ahead_.erase(next);
    }
  } else if (next != ahead_.begin() && std::prev(next)->second == offset) {
    std::prev(next)->second = end;
  } else {
    ahead_.emplace(next, offset, end);
  }
  return true;
}

}  // namespace smddp
