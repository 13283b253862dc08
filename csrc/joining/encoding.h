// Numbers and byte strings, one after the other in a blob: how what ranks publish in the store is written
// and read. Knows no format. The other files of this room call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace smddp {

class Writer {
 public:
  template <class T>
  void number(T value) {
    const auto* p = reinterpret_cast<const uint8_t*>(&value);
    out.insert(out.end(), p, p + sizeof value);
  }
  template <class Bytes>  // std::string, std::vector<uint8_t>
  void bytes(const Bytes& s) {
    number(static_cast<uint32_t>(s.size()));
    out.insert(out.end(), s.begin(), s.end());
  }
  std::vector<uint8_t> out;
};

// `in` must outlive it. After a read beyond the end `good` is false, and all further values are empty.
class Reader {
 public:
  explicit Reader(const std::vector<uint8_t>& in) : in_(in) {}
  template <class T>
  T number() {
    T value{};
    if (in_.size() - at_ < sizeof value) {
      good = false;
      return value;
    }
    std::memcpy(&value, in_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  template <class Bytes>
  Bytes bytes() {
    auto size = number<uint32_t>();
    return good ? take<Bytes>(size) : Bytes();
  }
  template <class Bytes>
  Bytes take(size_t size) {
    if (in_.size() - at_ < size) {
      good = false;
      return {};
    }
    Bytes s(in_.begin() + static_cast<std::ptrdiff_t>(at_),
            in_.begin() + static_cast<std::ptrdiff_t>(at_ + size));
    at_ += size;
    return s;
  }
  bool at_end() const { return at_ == in_.size(); }
  bool good = true;

 private:
  const std::vector<uint8_t>& in_;
  size_t at_ = 0;
};

}  // namespace smddp
