// The bytes of a fuzz input as the values that a target asks for. When they have run out, all values are
// zero. Used by the targets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace smddp::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), left_(size) {}

  bool empty() const { return left_ == 0; }
  template <class T>
  T number() {
    T value{};
    size_t n = std::min(sizeof value, left_);
    if (n > 0) std::memcpy(&value, at_, n);
    skip(n);
    return value;
  }
  // 0 .. `most`, at most 255.
  size_t up_to(size_t most) { return number<uint8_t>() % (most + 1); }
  // One time in eight, or so, any number; otherwise one near 0 or near `limit`.
  uint64_t offset(uint64_t limit) {
    auto kind = number<uint8_t>();
    if (kind < 96) return kind % 8;
    if (kind < 224) return limit + kind % 16 - 8;
    return number<uint64_t>();
  }
  std::vector<uint8_t> bytes(size_t most) {
    size_t n = std::min(most, left_);
    std::vector<uint8_t> taken(at_, at_ + n);
    skip(n);
    return taken;
  }
  // Up to `most` bytes, as many as the next byte says.
  std::vector<uint8_t> some(size_t most) {
    return bytes(std::min<size_t>(number<uint8_t>(), most));
  }

 private:
  void skip(size_t n) {
    at_ += n;
    left_ -= n;
  }
  const uint8_t* at_;
  size_t left_;
};

}  // namespace smddp::fuzz
