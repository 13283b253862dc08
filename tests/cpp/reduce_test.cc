#include "kernels/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "two_cores.h"

namespace smddp {
namespace {

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

// --- every instruction set, compared with one element at a time -----------------------------------

struct B16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
bool operator==(B16 a, B16 b) { return a.bits == b.bits; }
bool operator==(F16 a, F16 b) { return a.bits == b.bits; }

float wide(B16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
float wide(F16 x) { return half_by_definition(x.bits); }
template <class T>
T wide(T x) {
  return x;
}

void narrow(float x, B16* out) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = static_cast<uint16_t>(std::isnan(x) ? 0x7fc0 : rounded);
}
void narrow(float x, F16* out) {
  uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  // In units of the last place: nearbyint rounds to even.
  int exponent = std::max(std::isfinite(x) && x != 0 ? std::ilogb(x) : -14, -14);
  float units = std::nearbyint(std::ldexp(std::abs(x), 10 - exponent));
  uint32_t bits = static_cast<uint32_t>(exponent + 14) << 10;
  if (std::isnan(x)) {
    out->bits = 0x7e00;
  } else if (std::isinf(x) || exponent > 15) {
    out->bits = sign | 0x7c00;
  } else {
    out->bits = static_cast<uint16_t>(sign | (bits + static_cast<uint32_t>(units)));
  }
}
template <class T>
void narrow(T x, T* out) {
  *out = x;
}

template <class A>
A apply(ReduceOp op, A a, A x) {
  if (op == ReduceOp::kMin) return x < a || x != x ? x : a;
  if (op == ReduceOp::kMax) return x > a || x != x ? x : a;
  if constexpr (std::is_integral_v<A>) {
    auto b = static_cast<uint64_t>(a), y = static_cast<uint64_t>(x);
    return static_cast<A>(op == ReduceOp::kProduct ? b * y : b + y);
  } else {
    return op == ReduceOp::kProduct ? a * x : a + x;
  }
}

template <class T>
T reference(const std::vector<std::vector<T>>& sources, size_t n, size_t i, ReduceOp op, int by) {
  auto sum = wide(sources[0][i]);
  for (size_t k = 1; k < n; ++k) sum = apply(op, sum, wide(sources[k][i]));
  using A = decltype(sum);
  if constexpr (std::is_floating_point_v<A>) {
    if (by > 1) sum /= static_cast<A>(by);
  }
  T result;
  narrow(sum, &result);
  return result;
}

// The result of an fp32 or fp64 sum of several NaNs may be any of them.
template <class T>
bool same(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) && std::isnan(b)) return true;
  }
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// Some values have random bits, some are near one, some are special.
template <class T>
T arbitrary(std::mt19937& random) {
  T value;
  uint64_t bits = random() | static_cast<uint64_t>(random()) << 32;
  std::memcpy(&value, &bits, sizeof value);
  if constexpr (!std::is_integral_v<T>) {
    using A = decltype(wide(value));
    constexpr A kInf = std::numeric_limits<A>::infinity();
    const A special[] = {0,
                         A(-0.0),
                         kInf,
                         -kInf,
                         std::numeric_limits<A>::quiet_NaN(),
                         std::numeric_limits<A>::denorm_min(),
                         std::numeric_limits<A>::max(),
                         65504,
                         A(0x1p-24),
                         A(1 + 0x1p-8),
                         A(1 + 0x1p-11)};
    uint32_t kind = random() % 32;
    if (kind < std::size(special)) {
      narrow(special[kind], &value);
    } else if (kind < 22) {
      narrow(static_cast<A>(static_cast<int32_t>(random())) * A(0x1p-30), &value);
    }
  }
  return value;
}

template <class T>
std::vector<std::vector<T>> arbitrary_sources(size_t sources, size_t elements) {
  std::mt19937 random(7);
  std::vector<std::vector<T>> values(sources);
  for (auto& source : values) {
    for (size_t i = 0; i < elements; ++i) source.push_back(arbitrary<T>(random));
  }
  return values;
}

std::vector<kernels::Isa> isas() {
  std::vector<kernels::Isa> all;
  for (auto isa : {kernels::Isa::kBaseline, kernels::Isa::kAvx2, kernels::Isa::kAvx512}) {
    if (kernels::has(isa)) all.push_back(isa);
  }
  return all;
}

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

template <class T, Dtype kType>
struct Typed {
  using Element = T;
  static constexpr Dtype kDtype = kType;
};

template <class T>
class ReduceTyped : public testing::Test {
 protected:
  ReduceTyped() : best_(kernels::isa()) {}
  ~ReduceTyped() override { kernels::set_isa(best_); }

 private:
  kernels::Isa best_;
};
using Types = testing::Types<Typed<float, Dtype::kFloat32>, Typed<double, Dtype::kFloat64>,
                             Typed<B16, Dtype::kBFloat16>, Typed<F16, Dtype::kFloat16>,
                             Typed<int8_t, Dtype::kInt8>, Typed<uint8_t, Dtype::kUInt8>,
                             Typed<int16_t, Dtype::kInt16>, Typed<uint16_t, Dtype::kUInt16>,
                             Typed<int32_t, Dtype::kInt32>, Typed<uint32_t, Dtype::kUInt32>,
                             Typed<int64_t, Dtype::kInt64>, Typed<uint64_t, Dtype::kUInt64>>;
TYPED_TEST_SUITE(ReduceTyped, Types);

// Values in memory of their own, `shift` bytes after the start of a cache line, with a mark after them.
template <class T>
class Placed {
 public:
  Placed(const std::vector<T>& values, size_t count, size_t shift)
      : bytes_(count * sizeof(T)), memory_(bytes_ + 64 + shift + 1) {
    at_ = memory_.data() + -reinterpret_cast<uintptr_t>(memory_.data()) % 64 + shift;
    if (bytes_ > 0) std::memcpy(at_, values.data(), bytes_);
    at_[bytes_] = kMark;
  }
  void* data() { return at_; }
  T operator[](size_t i) const {
    T value;
    std::memcpy(&value, at_ + i * sizeof(T), sizeof value);
    return value;
  }
  bool intact() const { return at_[bytes_] == kMark; }

 private:
  static constexpr std::byte kMark{0x5a};
  size_t bytes_;
  std::vector<std::byte> memory_;
  std::byte* at_;
};

TYPED_TEST(ReduceTyped, ResultsAreTheSameWithEveryInstructionSet) {
  using T = typename TypeParam::Element;
  constexpr Dtype dtype = TypeParam::kDtype;
  constexpr size_t kMostSources = 9, kMostElements = 200;
  auto values = arbitrary_sources<T>(kMostSources, kMostElements);
  for (ReduceOp op : kOps) {
    for (size_t n = 1; n <= kMostSources; ++n) {
      int by = op != ReduceOp::kAvg ? 1 : n == kMostSources ? 256 : static_cast<int>(n);
      std::vector<T> expected;
      for (size_t i = 0; i < kMostElements; ++i) {
        expected.push_back(reference(values, n, i, op, by));
      }
      for (kernels::Isa isa : isas()) {
        ASSERT_TRUE(kernels::set_isa(isa));
        for (size_t count = 0; count <= kMostElements; ++count) {
          std::vector<Placed<T>> placed;
          std::vector<const void*> sources;
          for (size_t k = 0; k < n; ++k) {
            // All sources aligned, shifted by some elements, or shifted by odd numbers of bytes.
            size_t shift = count % 3 == 0 ? 0 : count % 3 == 1 ? k * sizeof(T) : 2 * k + 1;
            placed.emplace_back(values[k], count, shift);
            sources.push_back(placed.back().data());
          }
          bool in_place = count % 2 == 0;
          if (!in_place) placed.emplace_back(values[0], count, count % 5 * sizeof(T));
          Placed<T>& out = in_place ? placed[count / 2 % n] : placed.back();
          bool streaming = count % 4 < 2;
          kernels::reduce(out.data(), sources.data(), n, count, dtype, op, by, streaming);
          for (size_t i = 0; i < count; ++i) {
            ASSERT_TRUE(same(out[i], expected[i]))
                << name_of(isa) << ' ' << name_of(op) << ", element " << i << " of " << count
                << ", sources: " << n;
          }
          for (const auto& each : placed) ASSERT_TRUE(each.intact());
        }
      }
    }
  }
}

TYPED_TEST(ReduceTyped, ResultsInStepsAreTheSame) {
  using T = typename TypeParam::Element;
  using A = decltype(wide(T{}));
  constexpr Dtype dtype = TypeParam::kDtype;
  constexpr size_t n = 3, kMostElements = 200;
  auto values = arbitrary_sources<T>(n, kMostElements);
  for (ReduceOp op : kOps) {
    for (kernels::Isa isa : isas()) {
      ASSERT_TRUE(kernels::set_isa(isa));
      for (size_t count = 0; count <= kMostElements; ++count) {
        int by = op != ReduceOp::kAvg ? 1 : count % 2 == 0 ? 3 : 4;
        Placed<A> sum(std::vector<A>(count), count, 0);
        Placed<T> out(values[0], count, 1);
        for (size_t k = 0; k < n; ++k) {
          Placed<T> source(values[k], count, count % 2 * k);
          if (k == 0) kernels::load(sum.data(), source.data(), count, dtype);
          if (k != 0) kernels::accumulate(sum.data(), source.data(), count, dtype, op);
        }
        kernels::divide(sum.data(), count, kernels::accumulator_of(dtype), by);
        kernels::store(out.data(), sum.data(), count, dtype);
        ASSERT_TRUE(sum.intact() && out.intact());
        for (size_t i = 0; i < count; ++i) {
          ASSERT_TRUE(same(out[i], reference(values, n, i, op, by)))
              << name_of(isa) << ' ' << name_of(op) << ", element " << i << " of " << count;
        }
      }
    }
  }
}

template <class T>
class ReduceHalf : public ReduceTyped<T> {};
using HalfTypes = testing::Types<Typed<B16, Dtype::kBFloat16>, Typed<F16, Dtype::kFloat16>>;
TYPED_TEST_SUITE(ReduceHalf, HalfTypes);

// One source is widened and rounded again. Two sources are added, each value to one of random bits, and
// divided: by 3, which gives results anywhere between two halves, and by 2, which gives ties.
TYPED_TEST(ReduceHalf, EveryValue) {
  using T = typename TypeParam::Element;
  constexpr size_t kAll = 65536;
  std::mt19937 random(3);
  std::vector<std::vector<T>> values(2);
  for (uint32_t bits = 0; bits < kAll; ++bits) {
    values[0].push_back({static_cast<uint16_t>(bits)});
    values[1].push_back(arbitrary<T>(random));
  }
  const void* sources[] = {values[0].data(), values[1].data()};
  for (kernels::Isa isa : isas()) {
    ASSERT_TRUE(kernels::set_isa(isa));
    for (auto [n, op, by] : {std::tuple(1, ReduceOp::kSum, 1), std::tuple(1, ReduceOp::kSum, 3),
                             std::tuple(1, ReduceOp::kSum, 1024), std::tuple(2, ReduceOp::kSum, 1),
                             std::tuple(2, ReduceOp::kAvg, 2), std::tuple(2, ReduceOp::kAvg, 3),
                             std::tuple(2, ReduceOp::kMin, 1), std::tuple(2, ReduceOp::kMax, 1),
                             std::tuple(2, ReduceOp::kProduct, 1)}) {
      std::vector<T> out(kAll);
      kernels::reduce(out.data(), sources, n, kAll, TypeParam::kDtype, op, by);
      for (size_t i = 0; i < kAll; ++i) {
        ASSERT_EQ(out[i].bits, reference(values, n, i, op, by).bits)
            << name_of(isa) << ' ' << name_of(op) << " / " << by << ", " << n << ": " << std::hex
            << i << ' ' << values[1][i].bits;
      }
    }
  }
}

// Floats of all kinds, among them ties between halves and subnormal halves.
TYPED_TEST(ReduceHalf, EveryInstructionSetRoundsAlike) {
  using T = typename TypeParam::Element;
  std::mt19937 random(5);
  std::vector<float> values;
  for (uint32_t top = 0; top < 65536; ++top) {
    for (uint32_t low : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xefffu,
                         0xf000u, 0xffffu, static_cast<uint32_t>(random() & 0xffff)}) {
      values.push_back(std::bit_cast<float>(top << 16 | low));
    }
  }
  for (kernels::Isa isa : isas()) {
    ASSERT_TRUE(kernels::set_isa(isa));
    std::vector<T> out(values.size());
    kernels::store(out.data(), values.data(), values.size(), TypeParam::kDtype);
    for (size_t i = 0; i < values.size(); ++i) {
      T expected;
      narrow(values[i], &expected);
      ASSERT_EQ(out[i].bits, expected.bits) << name_of(isa) << ' ' << std::hexfloat << values[i];
    }
  }
}

class Reduce : public ReduceTyped<void> {};

// As a rank reads a slot: it sees the word that was stored after the copy, and then the bytes of the copy.
// How often it found old bytes.
int streams_and_reads(size_t bytes, std::chrono::milliseconds time) {
  alignas(64) static char from[4096], to[4096];
  alignas(64) static std::atomic<uint64_t> written, read;
  written = read = 0;
  std::atomic<bool> stop{false};
  auto await = [&](std::atomic<uint64_t>& what, uint64_t value) {
    for (int looks = 0; what.load(std::memory_order_acquire) != value && !stop; ++looks) {
      if (looks > 10'000) std::this_thread::yield();
    }
  };
  TwoCores cores;
  cores.take(0);
  std::thread writer([&] {
    cores.take(1);
    for (uint64_t i = 1; !stop; ++i) {
      std::memset(from, static_cast<int>(i % 100), bytes);
      kernels::copy_twice(to, from, from, bytes, true);
      written.store(i, std::memory_order_release);
      await(read, i);
    }
  });
  int old = 0;
  auto until = std::chrono::steady_clock::now() + time;
  for (uint64_t i = 1; std::chrono::steady_clock::now() < until; ++i) {
    await(written, i);
    old += std::atomic_ref(to[bytes - 1]).load(std::memory_order_relaxed) !=
           static_cast<char>(i % 100);
    read.store(i, std::memory_order_release);
  }
  stop = true;
  writer.join();
  return old;
}

TEST_F(Reduce, StreamedBytesAreVisibleBeforeWhatIsStoredAfterThem) {
  for (kernels::Isa isa : isas()) {
    kernels::set_isa(isa);
    for (size_t bytes : {256, 4096})
      EXPECT_EQ(streams_and_reads(bytes, std::chrono::milliseconds(100)), 0) << name_of(isa);
  }
}

TEST_F(Reduce, CopiesOfAnySizeToAnyAddress) {
  std::vector<char> from(1000), to(1000), also(1000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7);
  auto expect_copy = [&](const std::vector<char>& copy, size_t at, size_t back, size_t bytes) {
    ASSERT_EQ(std::memcmp(copy.data() + at, from.data() + back, bytes), 0) << bytes;
    ASSERT_EQ(copy[at + bytes], 1);
    ASSERT_TRUE(at == 0 || copy[at - 1] == 1);
  };
  for (kernels::Isa isa : isas()) {
    kernels::set_isa(isa);
    for (size_t bytes = 0; bytes < 700; ++bytes) {
      size_t at = bytes % 67, back = bytes % 31;
      std::fill(to.begin(), to.end(), char{1});
      kernels::copy(to.data() + at, from.data() + back, bytes, true);
      expect_copy(to, at, back, bytes);
      std::fill(to.begin(), to.end(), char{1});
      std::fill(also.begin(), also.end(), char{1});
      kernels::copy_twice(to.data() + at, also.data() + back, from.data() + back, bytes,
                          bytes % 2 == 0);
      expect_copy(to, at, back, bytes);
      expect_copy(also, back, back, bytes);
    }
  }
}

}  // namespace
}  // namespace smddp
