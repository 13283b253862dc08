// The keyed hash against the test vectors of its authors' reference implementation (vectors.h).
#include "common/siphash.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace smddp::siphash {
namespace {

// The inputs are the bytes 0, 1, 2 ... of so many bytes, the key the bytes 0 to 15. Every length of a last word that
// is not whole, alone and behind whole ones.
constexpr std::pair<size_t, uint64_t> kReference[] = {
    {0, 0x726fdb47dd0e0e31},  {1, 0x74f839c593dc67fd},  {2, 0x0d6c8009d9a94f5a},
    {3, 0x85676696d7fb7e2d},  {4, 0xcf2794e0277187b7},  {5, 0x18765564cd99a68d},
    {6, 0xcbc9466e58fee3ce},  {7, 0xab0200f58b01d137},  {8, 0x93f5f5799a932462},
    {15, 0xa129ca6149be45e5}, {16, 0x3f2acc7f57c29bdb}, {63, 0x958a324ceb064572},
};

Key reference_key() { return {0x0706050403020100, 0x0f0e0d0c0b0a0908}; }

std::vector<unsigned char> input_of(size_t size) {
  std::vector<unsigned char> input(size);
  for (size_t i = 0; i < size; ++i) input[i] = static_cast<unsigned char>(i);
  return input;
}

TEST(SipHash, GivesTheValuesOfTheReference) {
  for (auto [size, expected] : kReference)
    EXPECT_EQ(hash(reference_key(), input_of(size).data(), size), expected) << size;
}

TEST(SipHash, TakesItsInputInParts) {
  std::vector<unsigned char> input = input_of(63);
  for (size_t first = 0; first < 63; first += 8) {
    Hash parts(reference_key());
    parts.add(input.data(), first);
    parts.add(input.data() + first, 63 - first);
    EXPECT_EQ(parts.value(), hash(reference_key(), input.data(), 63)) << first;
  }
}

}  // namespace
}  // namespace smddp::siphash
