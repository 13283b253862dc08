// What ranks publish in the store, as bytes: numbers and byte strings, one after the other. Each structure lists
// its fields once, in a function fields(archive, structure), for the encoder and for the decoder. Knows no
// structure. The other files of this folder call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace smddp {

using Blob = std::vector<uint8_t>;

class Encoder {
 public:
  template <class T>
  void number(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* p = reinterpret_cast<const uint8_t*>(&value);
    out.insert(out.end(), p, p + sizeof value);
  }
  void version(uint32_t of) { number(of); }
  template <class... T>
  void operator()(const T&... values) {
    (put(values), ...);
  }
  Blob out;
  bool good = true;

 private:
  template <class T>
  void put(const T& value) {
    if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, Blob>) {
      number(static_cast<uint32_t>(value.size()));
      out.insert(out.end(), value.begin(), value.end());
    } else {
      number(value);
    }
  }
};

// `in` must outlive it. After a read beyond the end `good` is false, and all further values are empty.
class Decoder {
 public:
  explicit Decoder(const Blob& in) : in_(in) {}
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
  template <class Bytes>  // std::string, Blob
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
  void version(uint32_t of) { other_version = other_version || number<uint32_t>() != of || !good; }
  template <class... T>
  void operator()(T&... values) {
    (get(values), ...);
  }
  bool at_end() const { return at_ == in_.size(); }
  bool good = true;
  bool other_version =
      false;  // the bytes are those of another version of the package, or none of ours

 private:
  template <class T>
  void get(T& value) {
    if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, Blob>) {
      auto size = number<uint32_t>();
      value = good ? take<T>(size) : T();
    } else if constexpr (std::is_same_v<T, bool>) {
      value = number<uint8_t>() != 0;
    } else {
      value = number<T>();
    }
  }

  const Blob& in_;
  size_t at_ = 0;
};

}  // namespace smddp
