// SipHash-2-4, a keyed hash of short inputs (J.-P. Aumasson, D. J. Bernstein, "SipHash: a fast short-input
// PRF", 2012). A process without the key can't tell its values from random ones. Knows nothing of what is
// hashed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace smddp::siphash {

struct Key {
  uint64_t low = 0, high = 0;
  friend bool operator==(const Key&, const Key&) = default;
};

// Takes an input in parts; all but the last must be a multiple of 8 bytes long.
class Hash {
 public:
  explicit Hash(const Key& key)
      : a_(0x736f6d6570736575 ^ key.low),
        b_(0x646f72616e646f6d ^ key.high),
        c_(0x6c7967656e657261 ^ key.low),
        d_(0x7465646279746573 ^ key.high) {}

  void add(const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    size_ += bytes;
    for (; bytes >= 8; at += 8, bytes -= 8) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      absorb(word);
    }
    if (bytes > 0) std::memcpy(&rest_, at, bytes);  // of nothing, `data` may be nullptr
  }
  uint64_t value() {
    absorb(rest_ | size_ << 56);
    c_ ^= 0xff;
    for (int i = 0; i < 4; ++i) round();
    return a_ ^ b_ ^ c_ ^ d_;
  }

 private:
  static_assert(std::endian::native == std::endian::little);

  void absorb(uint64_t word) {
    d_ ^= word;
    round();
    round();
    a_ ^= word;
  }
  void round() {
    a_ += b_;
    c_ += d_;
    b_ = std::rotl(b_, 13) ^ a_;
    d_ = std::rotl(d_, 16) ^ c_;
    a_ = std::rotl(a_, 32);
    c_ += b_;
    a_ += d_;
    b_ = std::rotl(b_, 17) ^ c_;
    d_ = std::rotl(d_, 21) ^ a_;
    c_ = std::rotl(c_, 32);
  }

  uint64_t a_, b_, c_, d_;
  uint64_t rest_ = 0;
  uint64_t size_ = 0;
};

inline uint64_t hash(const Key& key, const void* data, size_t bytes) {
  Hash hash(key);
  hash.add(data, bytes);
  return hash.value();
}

}  // namespace smddp::siphash
