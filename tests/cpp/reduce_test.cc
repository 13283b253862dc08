#include "device/reduce.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace smddp {
namespace {

float widened(uint16_t bits, Dtype dtype) {
  float value;
  device::load(&value, &bits, 1, dtype);
  return value;
}

uint16_t narrowed(float value, Dtype dtype) {
  uint16_t bits;
  device::store(&bits, &value, 1, dtype);
  return bits;
}

// The definition of binary16, independent of the bit tricks under test.
float half_by_definition(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31)
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

TEST(Reduce, EveryHalfSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    auto h = static_cast<uint16_t>(bits);
    float wide = widened(h, Dtype::kFloat16);
    if (std::isnan(half_by_definition(h))) {
      EXPECT_TRUE(std::isnan(wide));
      continue;
    }
    ASSERT_EQ(wide, half_by_definition(h)) << bits;
    ASSERT_EQ(narrowed(wide, Dtype::kFloat16), h) << bits;
    float b = widened(h, Dtype::kBFloat16);
    if (!std::isnan(b)) ASSERT_EQ(narrowed(b, Dtype::kBFloat16), h) << bits;
  }
}

TEST(Reduce, RoundsToNearestEven) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isfinite(x)) continue;
    for (Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16}) {
      uint16_t got = narrowed(x, dtype);
      auto at = [&](int step) {
        return static_cast<double>(widened(static_cast<uint16_t>(got + step), dtype));
      };
      if (!std::isfinite(at(0)) || !std::isfinite(at(1)) || (got & 0x7fff) == 0) continue;
      double error = std::abs(at(0) - static_cast<double>(x));
      EXPECT_LE(error, std::abs(at(1) - static_cast<double>(x)));
      EXPECT_LE(error, std::abs(at(-1) - static_cast<double>(x)));
      if (error == std::abs(at(1) - static_cast<double>(x))) EXPECT_EQ(got & 1, 0);
    }
  }
  EXPECT_EQ(narrowed(65519.0f, Dtype::kFloat16), 0x7bff);
  EXPECT_EQ(narrowed(65520.0f, Dtype::kFloat16), 0x7c00);
}

TEST(Reduce, OperatorsOnUnalignedSources) {
  for (Dtype dtype : {Dtype::kInt64, Dtype::kInt32}) {
    std::vector<std::byte> memory(64);
    std::vector<int64_t> a(2), b(2);
    auto run = [&](int64_t x, int64_t y, ReduceOp op) {
      std::byte* odd = memory.data() + 1;
      alignas(8) std::byte accumulator[8];
      int32_t x4 = static_cast<int32_t>(x), y4 = static_cast<int32_t>(y);
      bool wide = dtype == Dtype::kInt64;
      std::memcpy(odd, wide ? static_cast<void*>(&x) : &x4, size_of(dtype));
      device::load(accumulator, odd, 1, dtype);
      std::memcpy(odd, wide ? static_cast<void*>(&y) : &y4, size_of(dtype));
      device::accumulate(accumulator, odd, 1, dtype, op);
      device::store(odd, accumulator, 1, dtype);
      int64_t r8 = 0;
      int32_t r4 = 0;
      std::memcpy(wide ? static_cast<void*>(&r8) : &r4, odd, size_of(dtype));
      return wide ? r8 : r4;
    };
    EXPECT_EQ(run(-3, 7, ReduceOp::kSum), 4);
    EXPECT_EQ(run(-3, 7, ReduceOp::kMin), -3);
    EXPECT_EQ(run(-3, 7, ReduceOp::kMax), 7);
    EXPECT_EQ(run(-3, 7, ReduceOp::kProduct), -21);
  }
}

TEST(Reduce, MinAndMaxHandNanOn) {
  float nan = std::numeric_limits<float>::quiet_NaN(), one = 1;
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    float a = nan;
    device::accumulate(&a, &one, 1, Dtype::kFloat32, op);
    EXPECT_TRUE(std::isnan(a));
    a = one;
    device::accumulate(&a, &nan, 1, Dtype::kFloat32, op);
    EXPECT_TRUE(std::isnan(a));
  }
}

}  // namespace
}  // namespace smddp
