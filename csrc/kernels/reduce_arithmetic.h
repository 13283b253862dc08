// What one thread of the reduction kernel computes, in code that compilers for the host and for CUDA both
// accept. device/ makes GPU kernels of it, and calls it for the threads that simulate a GPU. Tests on the
// host compare it with the CPU's sums, to the bit.
//
// Half types are summed in fp32 and rounded once, every other type is summed in itself, in the order of the
// sources. Integers wrap. The result of MIN and MAX is NaN if a source is NaN. Half types have one NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/reduction.h"

// A source for a GPU defines both macros and includes the headers of the half types before it includes this.
#if !defined(SMDDP_BOTH)
#define SMDDP_BOTH inline
#define SMDDP_UNROLL
#endif

namespace smddp::kernels {

struct alignas(16) Lane {
  uint32_t word[4];
};

template <class To, class From>
SMDDP_BOTH To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// --- element types: their form in memory, and the type that sums them -------------------------------

template <class T>
struct Native {
  using Memory = T;
  using Sum = T;
  SMDDP_BOTH static Sum widen(Memory x) { return x; }
  SMDDP_BOTH static Memory narrow(Sum x) { return x; }
};

struct BFloat16 {
  using Memory = uint16_t;
  using Sum = float;
  SMDDP_BOTH static float widen(uint16_t x) {
    return bits_of<float>(static_cast<uint32_t>(x) << 16);
  }
  SMDDP_BOTH static uint16_t narrow(float x) {
    if (x != x) return 0x7fc0;
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
    uint32_t bits = bits_of<uint32_t>(x);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
  }
};

struct Float16 {
  using Memory = uint16_t;
  using Sum = float;
  SMDDP_BOTH static float widen(uint16_t x) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(x));
#else
    uint32_t magnitude = x & 0x7fffu;
    // With exponent and fraction shifted to their fp32 places, the value is too small by 2^112. The
    // multiplication corrects that, and makes subnormals normal. Infinity and NaN keep the largest exponent.
    uint32_t bits = bits_of<uint32_t>(bits_of<float>(magnitude << 13) * 0x1p112f);
    if (magnitude >= 0x7c00) bits |= 0x7f800000;
    if (magnitude > 0x7c00) bits |= 0x00400000;
    return bits_of<float>(bits | static_cast<uint32_t>(x & 0x8000u) << 16);
#endif
  }
  SMDDP_BOTH static uint16_t narrow(float x) {
    if (x != x) return 0x7e00;
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(x));
#else
    uint32_t sign = bits_of<uint32_t>(x) >> 16 & 0x8000;
    uint32_t bits = bits_of<uint32_t>(x) & 0x7fffffff;
    uint32_t half = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    // The result is a subnormal half: adding 0.5 makes the FPU round at the right bit.
    if (bits < 0x38800000) half = bits_of<uint32_t>(bits_of<float>(bits) + 0.5f) - 0x3f000000;
    if (bits >= 0x477ff000) half = 0x7c00;  // x rounds to more than the largest finite half
    return static_cast<uint16_t>(half | sign);
#endif
  }
};

// --- operations -------------------------------------------------------------------------------------

// Sums and products of integers are computed unsigned and no narrower than int, where wrapping is defined.
template <class T, bool kInteger = std::is_integral_v<T>>
struct Wrapping {
  using Type = std::conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>;
};
template <class T>
struct Wrapping<T, false> {
  using Type = T;
};
template <class T>
using Wraps = typename Wrapping<T>::Type;

struct SumOf {
  template <class T>
  SMDDP_BOTH static T apply(T a, T x) {
    return static_cast<T>(static_cast<Wraps<T>>(a) + static_cast<Wraps<T>>(x));
  }
};
struct ProductOf {
  template <class T>
  SMDDP_BOTH static T apply(T a, T x) {
    return static_cast<T>(static_cast<Wraps<T>>(a) * static_cast<Wraps<T>>(x));
  }
};
struct MinimumOf {
  template <class T>
  SMDDP_BOTH static T apply(T a, T x) {
    return x < a || x != x ? x : a;
  }
};
struct MaximumOf {
  template <class T>
  SMDDP_BOTH static T apply(T a, T x) {
    return x > a || x != x ? x : a;
  }
};

// Multiplication by the inverse of a power of two gives the quotient to the bit. Integers are not divided.
template <class S>
SMDDP_BOTH S divided(S sum, int by) {
  if constexpr (std::is_floating_point_v<S>) {
    if (by > 1 && (by & (by - 1)) == 0) return sum * (S(1) / static_cast<S>(by));
    if (by > 1) return sum / static_cast<S>(by);
  }
  return sum;
}

// --- the share of one thread -------------------------------------------------------------------------

SMDDP_BOTH size_t place_in_lane(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Lane);
}

// Which elements are read in lanes of 16 bytes: `lanes` lanes after the first `head` elements. The others, at
// the beginning and at the end, are reduced one by one. Every address is a multiple of the element's size. There
// are lanes if all sources have the same remainder by 16, as equal parts of equal tensors have.
struct Parts {
  size_t head, lanes;
};
SMDDP_BOTH Parts parts_of(const Reduction& r, size_t element_size) {
  size_t first = place_in_lane(r.sources[0]);
  bool alike = true;
  for (size_t k = 1; k < r.sources_count; ++k)
    alike = alike && place_in_lane(r.sources[k]) == first;
  size_t head = alike ? (sizeof(Lane) - first) % sizeof(Lane) / element_size : r.count;
  if (head > r.count) head = r.count;
  return {head, (r.count - head) * element_size / sizeof(Lane)};
}

// Reduces the elements of kLanes lanes of 16 bytes, `stride` bytes apart, from byte `at` on. The sources have
// aligned lanes there. If the destination has not, its elements are written one by one.
template <class Element, class Op, int kLanes>
SMDDP_BOTH void reduce_lanes(const Reduction& r, size_t at, size_t stride) {
  using Memory = typename Element::Memory;
  using Sum = typename Element::Sum;
  constexpr int kEach = static_cast<int>(sizeof(Lane) / sizeof(Memory));
  // So many sources are read before the first of them is added: their reads are under way together. A half
  // type's sums take twice the registers of its lanes.
  constexpr int kTogether = sizeof(Memory) == 2 ? 3 : 4;
  Sum sum[kLanes][kEach] = {};
  for (size_t k = 0; k < r.sources_count; k += kTogether) {
    Lane lane[kTogether][kLanes];
    SMDDP_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      if (k + static_cast<size_t>(j) >= r.sources_count) continue;
      const char* source = static_cast<const char*>(r.sources[k + static_cast<size_t>(j)]) + at;
      SMDDP_UNROLL
      for (int i = 0; i < kLanes; ++i)
        lane[j][i] = *reinterpret_cast<const Lane*>(source + static_cast<size_t>(i) * stride);
    }
    SMDDP_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      if (k + static_cast<size_t>(j) >= r.sources_count) continue;
      bool first = k == 0 && j == 0;
      SMDDP_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        Memory x[kEach];
        memcpy(x, &lane[j][i], sizeof x);
        SMDDP_UNROLL
        for (int e = 0; e < kEach; ++e) {
          Sum element = Element::widen(x[e]);
          sum[i][e] = first ? element : Op::apply(sum[i][e], element);
        }
      }
    }
  }
  char* to = static_cast<char*>(r.destination) + at;
  const bool in_lanes = place_in_lane(to) == 0;
  SMDDP_UNROLL
  for (int i = 0; i < kLanes; ++i) {
    Memory x[kEach];
    SMDDP_UNROLL
    for (int e = 0; e < kEach; ++e) x[e] = Element::narrow(divided(sum[i][e], r.divisor));
    char* here = to + static_cast<size_t>(i) * stride;
    if (in_lanes) {
      Lane lane;
      memcpy(&lane, x, sizeof lane);
      *reinterpret_cast<Lane*>(here) = lane;
    } else {
      SMDDP_UNROLL
      for (int e = 0; e < kEach; ++e) reinterpret_cast<Memory*>(here)[e] = x[e];
    }
  }
}

// Reduces element i alone.
template <class Element, class Op>
SMDDP_BOTH void reduce_one(const Reduction& r, size_t i) {
  using Memory = typename Element::Memory;
  using Sum = typename Element::Sum;
  Sum sum = Element::widen(static_cast<const Memory*>(r.sources[0])[i]);
  for (size_t k = 1; k < r.sources_count; ++k) {
    sum = Op::apply(sum, Element::widen(static_cast<const Memory*>(r.sources[k])[i]));
  }
  static_cast<Memory*>(r.destination)[i] = Element::narrow(divided(sum, r.divisor));
}

// Reduces the share of thread `thread` of `threads`.
template <class Element, class Op>
SMDDP_BOTH void reduce_share_as(const Reduction& r, size_t thread, size_t threads) {
  constexpr size_t kSize = sizeof(typename Element::Memory);
  // Of each source; more would not fit the registers of 1,024 threads.
  constexpr int kLanes = kSize == 1 ? 1 : 2;
  const auto [head, lanes] = parts_of(r, kSize);
  for (size_t i = thread; i < head; i += threads) reduce_one<Element, Op>(r, i);
  size_t lane = thread;
  for (; lane + (kLanes - 1) * threads < lanes; lane += kLanes * threads) {
    reduce_lanes<Element, Op, kLanes>(r, head * kSize + lane * sizeof(Lane),
                                      threads * sizeof(Lane));
  }
  for (; lane < lanes; lane += threads) {
    reduce_lanes<Element, Op, 1>(r, head * kSize + lane * sizeof(Lane), 0);
  }
  for (size_t i = head + lanes * sizeof(Lane) / kSize + thread; i < r.count; i += threads) {
    reduce_one<Element, Op>(r, i);
  }
}

// The operations, with their part of a kernel's name: smddp_reduce_<type>_<operation>.
#define SMDDP_REDUCING_OPS(X, type, element, name) \
  X(type, element, name, SumOf, sum)               \
  X(type, element, name, ProductOf, product)       \
  X(type, element, name, MinimumOf, min)           \
  X(type, element, name, MaximumOf, max)

#if !defined(__CUDACC__)
inline void reduce_share(const Reduction& r, size_t thread, size_t threads) {
  auto as = [&](auto element) {
    using Element = decltype(element);
    switch (r.op) {
      case ReduceOp::kNone:
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        return reduce_share_as<Element, SumOf>(r, thread, threads);
      case ReduceOp::kProduct:
        return reduce_share_as<Element, ProductOf>(r, thread, threads);
      case ReduceOp::kMin:
        return reduce_share_as<Element, MinimumOf>(r, thread, threads);
      case ReduceOp::kMax:
        return reduce_share_as<Element, MaximumOf>(r, thread, threads);
    }
  };
  switch (r.dtype) {
#define SMDDP_CASE(type, element, name) \
  case Dtype::type:                     \
    return as(element{});
    SMDDP_REDUCED_TYPES(SMDDP_CASE)
#undef SMDDP_CASE
    case Dtype::kBytes:
      return as(Native<uint8_t>{});
  }
}
#endif

}  // namespace smddp::kernels
